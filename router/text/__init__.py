"""Between text and token ids: prompts and chats in, pieces of text and stop strings out. Knows no workers."""
