"""Trains the embedded talking character from rendered faces and synthesized speech."""
