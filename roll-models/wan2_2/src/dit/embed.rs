//! Embeddings of time, text and image tokens, which all blocks read.

use burn_tensor::{Tensor, activation};
use roll_backends::{Scope, ops};
use roll_core::Result;
pub use roll_network::timestep::sinusoid;

/// Epsilon of every norm of the network.
pub const EPS: f64 = 1e-6;

/// Epsilon of the norms in the image branch: PyTorch's default for LayerNorm.
const IMAGE_EPS: f64 = 1e-5;

/// Embeds the sinusoids of G timesteps. Returns the embedded timesteps `[G, dim]` for the head, and the modulations
/// `[G, 6 * dim]` for the blocks.
pub fn time(scope: &Scope<'_>, sinusoid: Tensor<2>) -> Result<(Tensor<2>, Tensor<2>)> {
    let hidden = ops::silu(scope.linear(sinusoid, "time_embedding.0")?);
    let embedded = scope.linear(hidden, "time_embedding.2")?;
    let projected = scope.linear(ops::silu(embedded.clone()), "time_projection.1")?;
    Ok((embedded, projected))
}

/// Embeds text: `[L, text_dim]` to `[L, dim]`.
pub fn text(scope: &Scope<'_>, context: Tensor<2>) -> Result<Tensor<2>> {
    let hidden = ops::gelu_tanh(scope.linear(context, "text_embedding.0")?);
    scope.linear(hidden, "text_embedding.2")
}

/// Embeds CLIP image tokens: `[L, image_dim]` to `[L, dim]`.
pub fn image(scope: &Scope<'_>, tokens: Tensor<2>) -> Result<Tensor<2>> {
    let norm = |x: Tensor<2>, name: &str| -> Result<Tensor<2>> {
        let gain = scope.weight::<1>(&format!("{name}.weight"))?.unsqueeze();
        let shift = scope.weight::<1>(&format!("{name}.bias"))?.unsqueeze();
        Ok(ops::layer_norm(x, gain, shift, IMAGE_EPS))
    };
    let hidden = scope.linear(norm(tokens, "img_emb.proj.0")?, "img_emb.proj.1")?;
    let hidden = scope.linear(activation::gelu(hidden), "img_emb.proj.3")?;
    norm(hidden, "img_emb.proj.4")
}
