"""The processes of a training: joined, watched, told to stop."""
