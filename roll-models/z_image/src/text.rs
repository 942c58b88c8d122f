//! Text features of Qwen3.
