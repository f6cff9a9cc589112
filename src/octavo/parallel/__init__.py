"""Process groups and collectives for a model on several devices. Nothing yet: one device serves a model today."""
