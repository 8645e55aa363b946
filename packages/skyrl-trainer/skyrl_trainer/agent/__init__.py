"""How an agent speaks with a policy: prompts as token ids, and text out of them."""
