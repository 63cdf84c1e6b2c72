"""Helpers of the test suite: real processes and real files, no mocks of our own code."""
