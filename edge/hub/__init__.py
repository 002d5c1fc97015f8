"""Models on the Hugging Face Hub: names, listings, headers, downloads, and the cache folder that other tools share."""
