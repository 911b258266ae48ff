"""Videos over HTTP: the routes of OpenAI's video API around `vkit.video`."""
