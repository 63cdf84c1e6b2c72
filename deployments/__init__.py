"""Deployments that come with SpecPilot: data, no code. One folder each, with a `deployment.yaml`."""
