"""Engine trees and adapters. A tree (`slim/`) runs as its own server process from a copy; nothing here is imported by the control plane."""
