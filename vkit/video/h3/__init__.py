"""MiniMax-H3: text, pictures, clips and sounds to video with stereo sound. See docs/video.md.

The modules without torch (`request`, `plan`, `geometry`) can be imported by any command.
"""
