"""Speech to text: recordings to features, features to tokens, tokens to timed text. Knows no server and no engine."""
