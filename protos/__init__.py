"""The wire between the services: .proto files, the code generated from them, and what every service does alike."""
