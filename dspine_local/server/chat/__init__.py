"""Chats: messages to a prompt, and the answer's text to content, reasoning and tool calls."""
