"""Chats: the model's text as content, reasoning and tool calls, and a conversation in a terminal."""
