"""The model of a finished run used: chat, answers to files of prompts, evaluation."""
