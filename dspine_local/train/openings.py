"""Openings of user messages, which the target completes to prompts: they steer its own imagination to four kinds."""

from __future__ import annotations

MATH = (
    "What is the value of", "Solve for x:", "Solve the equation", "Calculate the", "If a train travels",
    "A store sells",
    "Find the area of", "Find the perimeter of", "How many", "What is the probability that", "A farmer has", "Simplify",
    "What is the derivative of", "Explain how to compute", "John has", "Sarah bought", "A recipe needs", "Convert",
    "What is the sum of", "The price of", "A rectangle has", "What percentage of", "Find the average of", "Two numbers",
    "A car drives", "Prove that", "What is the next number in the sequence", "In a class of", "Factor the expression",
    "How do you find the", "Evaluate", "A bag contains", "Write the fraction",
)  # fmt: skip
CODE = (
    "Write a Python function that", "Write a Python script that", "Write a function to", "Write a JavaScript function",
    "Write a C++ program that", "Write a Java method", "How do I", "Fix the bug in this code:\n", "Write an SQL query",
    "Explain what this code does:\n", "Implement a", "Write a class", "Write a bash script", "What does the following",
    "Create a Python program", "Write a recursive function", "How can I sort", "Given a list of", "Given a string",
    "Write unit tests for", "Write a regular expression", "Write HTML for", "def ", "Convert this code", "How do you",
    "Write a Rust function", "In Python, how", "Write code that reads", "Complete the function:\n", "Optimize",
)  # fmt: skip
CHAT = (
    "", "", "", "", "What is", "Why", "How does", "How can I", "Can you explain", "Who was", "When did", "Where is",
    "What are the benefits of", "What is the difference between", "Tell me about", "Give me advice on", "I feel",
    "What should I", "Describe", "Explain", "Is it", "Do you", "Can you recommend", "I want to learn", "Compare",
    "What happens when", "Give me tips", "List", "What causes", "Which", "My friend", "Summarize", "I'm planning",
    "What are some", "Help me understand", "Hi!", "Should I", "Name three", "Could you", "In history,",
)  # fmt: skip
WRITING = (
    "Write a short story about", "Write a poem about", "Write an email to", "Write a letter", "Write an essay on",
    "Write a blog post about", "Write a product description for", "Write a speech", "Write a dialogue between",
    "Write a haiku", "Write a paragraph about", "Rewrite the following sentence", "Summarize the following text:",
    "Write a review of", "Write a song about", "Write a news article", "Describe a character who",
    "Write an introduction",
    "Edit the following paragraph", "Make this text more formal:", "Write a scene", "Create an outline for",
    "Write a cover letter", "Write a description of", "Compose a message", "Continue this story:",
    "Write a thank-you note",
    "Write an opening line", "Write a fairy tale", "Improve this sentence:",
)  # fmt: skip

KINDS: dict[str, tuple[str, ...]] = {"math": MATH, "code": CODE, "chat": CHAT, "writing": WRITING}
