"""Speech to text by Whisper: windows of a sound, the rules by which its tokens are chosen, and what comes of them."""
