//! The KL autoencoder.
