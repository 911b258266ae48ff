"""Video with sound: media in and out, and the models that make it. `vkit.video.h3` is MiniMax-H3."""
