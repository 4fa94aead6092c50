"""The pack component."""
