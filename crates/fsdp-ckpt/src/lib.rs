//! Checkpoint file formats: safetensors reading, writing and streaming export.
