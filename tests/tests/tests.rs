//! The integration tests of the workspace, one module per theme.
