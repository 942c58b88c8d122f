//! Face embedding with an ArcFace network.

use burn_tensor::Device;
use roll_backends::NdTensor;
use roll_backends::host::{to_device_nd, to_host_nd};
use roll_core::{Error, Grad, Result, Tensor};
use roll_onnx::{Network, Recorded};

use super::align::CROP;
use super::config::ChannelOrder;
use crate::RewardError;

/// Number of pixels of a crop.
const PLANE: usize = CROP * CROP;

/// An embedding network and its settings.
#[derive(Debug)]
pub struct Embedder {
    network: Network,
    order: ChannelOrder,
    device: Device,
}

/// Embeddings of a batch of crops, `[N, width]`, row-major and not normalised; only their direction is meaningful.
#[derive(Clone, Debug)]
pub struct Embeddings {
    /// The values.
    pub values: Vec<f32>,
    /// Length of one embedding.
    pub width: usize,
}

/// The recorded pass of a batch, for its pullback.
#[derive(Debug)]
pub struct EmbeddingPull {
    recorded: Recorded,
    /// Shape of the embeddings.
    shape: [usize; 2],
    order: ChannelOrder,
    device: Device,
}

impl Embedder {
    /// Fails unless `network` has an input `[N, 3, 112, 112]`.
    pub fn new(network: Network, order: ChannelOrder, device: &Device) -> Result<Self> {
        let model = network.model();
        let shape = &model.inputs()[0].shape;
        let fits = match shape[..] {
            [] => true,
            [_, c, h, w] => c.is_none_or(|c| c == 3) && [h, w].into_iter().all(|d| d.is_none_or(|d| d == CROP)),
            _ => false,
        };
        if !fits {
            let problem = format!("expected an input [N, 3, {CROP}, {CROP}], found {shape:?}");
            let path = model.path().into();
            return Err(RewardError::NotTheNetwork { role: "face embedder", path, problem }.into());
        }
        Ok(Self { network, order, device: device.clone() })
    }

    /// Path of the network's file.
    pub fn path(&self) -> &std::path::Path {
        self.network.model().path()
    }

    /// The network.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Embeds crops, `[N, 3, 112, 112]` RGB in [-1, 1], row-major, without a pullback. With [`Grad::Record`], a later
    /// gradient will use these embeddings as constants, such as those of a reference (see [`Network::run`]).
    pub fn embed(&self, crops: Vec<f32>, grad: Grad) -> Result<Embeddings> {
        let input = self.input(crops)?;
        let items = input.shape()[0];
        // A file may have several outputs; the embedding is the first.
        let output = self.network.run(&input, grad.is_on())?;
        let first = output.first().ok_or_else(|| Error::Misuse("an ONNX model without outputs was opened".into()))?;
        self.to_embeddings(first, items)
    }

    /// Embeds crops like [`Embedder::embed`], with the pullback to the crops.
    pub fn vjp(&self, crops: Vec<f32>) -> Result<(Embeddings, EmbeddingPull)> {
        let input = self.input(crops)?;
        let items = input.shape()[0];
        let (value, recorded) = self.network.vjp(&input)?;
        let embeddings = self.to_embeddings(&value, items)?;
        let shape = [items, embeddings.width];
        Ok((embeddings, EmbeddingPull { recorded, shape, order: self.order, device: self.device.clone() }))
    }

    /// The network's input for RGB crops, on the device.
    fn input(&self, mut crops: Vec<f32>) -> Result<NdTensor> {
        reorder(&mut crops, self.order);
        let items = crops.len() / (3 * PLANE);
        to_device_nd(&Tensor::new(crops, [items, 3, CROP, CROP])?, &self.device)
    }

    /// Reads an output as embeddings. Fails unless it has one row per item.
    fn to_embeddings(&self, output: &NdTensor, items: usize) -> Result<Embeddings> {
        match *output.shape() {
            [n, width] if n == items => Ok(Embeddings { values: to_host_nd(output)?.to_f32_vec(), width }),
            ref found => Err(RewardError::NotTheNetwork {
                role: "face embedder",
                path: self.path().into(),
                problem: format!("expected an output [{items}, D] for {items} faces, found {found:?}"),
            }
            .into()),
        }
    }
}

impl EmbeddingPull {
    /// Maps the cotangent of the embeddings, `[N, width]`, to that of the crops, `[N, 3, 112, 112]` RGB.
    pub fn pull(self, cotangent: Vec<f32>) -> Result<Vec<f32>> {
        let cotangent = to_device_nd(&Tensor::new(cotangent, self.shape)?, &self.device)?;
        let mut crops = to_host_nd(&self.recorded.pull(cotangent)?)?.to_f32_vec();
        reorder(&mut crops, self.order);
        Ok(crops)
    }
}

/// Converts crops from RGB to `order`, or from `order` to RGB, which is the same exchange of red and blue.
fn reorder(crops: &mut [f32], order: ChannelOrder) {
    if order == ChannelOrder::Bgr {
        for crop in crops.chunks_exact_mut(3 * PLANE) {
            let (red, rest) = crop.split_at_mut(PLANE);
            red.swap_with_slice(&mut rest[PLANE..]);
        }
    }
}
