"""Research: what eviction of tokens, eviction in the prompt and sliding windows gain and cost. No server needs it."""
