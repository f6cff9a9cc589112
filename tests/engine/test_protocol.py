"""Messages between server and engine arrive as they were sent, and each output reaches its reader."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.mailbox import Mailbox
from octavo.engine.messages import EngineOutput, EngineStats
from octavo.engine.outputs import Logprob
from octavo.engine.protocol import decode_from_engine, encode, outputs_message

outputs = st.builds(
    EngineOutput,
    request_id=st.text(min_size=1, max_size=4),
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3),
    logprobs=st.none() | st.just([{5: Logprob(-0.5, 1)}]),
    prompt_logprobs=st.none() | st.just([None, {5: Logprob(-0.5, 1)}]),
    finish_reason=st.sampled_from([None, "stop", "length", "error"]),
    stop_reason=st.none() | st.integers(0, 9) | st.just("end"),
    queue_s=st.none() | st.just(0.25),
    prefill_s=st.none() | st.just(0.5),
)


@given(st.lists(outputs, max_size=6, unique_by=lambda output: output.request_id), st.booleans())
def test_a_steps_outputs_arrive_as_they_were(sent: list[EngineOutput], with_stats: bool) -> None:
    stats = EngineStats(running=3) if with_stats else None
    message = decode_from_engine(encode(outputs_message(sent, stats)))
    plain = [EngineOutput(name, [token]) for name, token in zip(message.names, message.tokens, strict=True)]
    assert sorted([*plain, *message.outputs], key=lambda o: o.request_id) == sorted(sent, key=lambda o: o.request_id)
    assert message.stats == stats


def test_one_token_of_a_running_request_travels_in_short_form() -> None:
    sent = [EngineOutput(str(i), [i], num_cached_tokens=16) for i in range(100)]
    message = outputs_message(sent, None)
    assert message.names == [str(i) for i in range(100)] and message.tokens == list(range(100))
    assert not message.outputs


def test_a_mailbox_keeps_the_order_and_survives_a_reader_that_gives_up() -> None:
    async def main() -> None:
        box = Mailbox()
        reader = asyncio.create_task(box.get())
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.sleep(0)
        for name in "abc":
            box.put(EngineOutput(name))
        assert [(await box.get()).request_id for _ in range(3)] == ["a", "b", "c"]
        late = asyncio.create_task(box.get())
        await asyncio.sleep(0)
        box.put(EngineOutput("d"))
        box.put(EngineOutput("e"))  # while the reader is about to wake up
        assert (await late).request_id == "d"
        assert (await box.get()).request_id == "e"

    asyncio.run(main())
