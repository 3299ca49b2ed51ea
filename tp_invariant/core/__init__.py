"""What every wing uses and no rank sends: the gate, layouts, comparing bits, custom operators, processes."""
