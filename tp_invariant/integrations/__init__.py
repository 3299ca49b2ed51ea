"""What other projects' trainers and adapters need to work with this library's models; imported by name alone."""
