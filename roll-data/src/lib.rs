//! Videos, images and datasets.
