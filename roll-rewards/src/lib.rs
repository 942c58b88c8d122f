//! Rewards: a differentiable ONNX executor and the InsightFace identity score.

pub mod onnx;
