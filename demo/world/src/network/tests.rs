use burn_tensor::{DType, Device, Tensor, TensorData};
use roll_backends::{NdTensor, Parameters, Scope, Tape, Weights};
use roll_core::{Noise, Purpose};
use roll_onnx::Model;

use super::{Network, Value, evaluate};
use crate::training::initial_values;
use crate::{detector, embedder, onnx_writer};

/// Returns the largest difference between the outputs of a network on Burn and of its ONNX file in our executor,
/// relative to the largest output.
fn difference(network: &Network) -> f32 {
    let device = Device::flex();
    let mut values = initial_values(&network.parameters, 3);
    // Biases and slopes start equal. Different values in each reveal transposed or swapped ones.
    let noise = Noise::new(4);
    let mut draw = noise.uniform(Purpose::Synthetic, 0, 0);
    values.iter_mut().for_each(|v| *v += 0.02 * draw());
    let parameters = split(network, &values, &device);
    let parameters = parameters.snapshot().segment("").unwrap();
    let [h, w] = network.picture;
    let batch: Vec<f32> = (0..2 * 3 * h * w).map(|_| draw()).collect();
    let batch = Tensor::<4>::from_data(TensorData::new(batch, [2, 3, h, w]), (&device, DType::F32));
    let (weights, tape) = (Weights::default(), Tape::off());
    let scope = Scope {
        weights: &weights,
        trainable: Some(&parameters),
        lora_scale: 1.0,
        tape: &tape,
        products: burn_tensor::DType::F32,
        fp8: false,
    };
    let wanted: Vec<Value> = network.outputs.iter().map(|o| o.1).collect();
    let ours = evaluate(network, batch.clone(), &scope, &wanted).unwrap();
    let bytes = onnx_writer::encode(network, &values);
    let model = Model::parse("network.onnx".as_ref(), &bytes, &device).unwrap();
    let theirs = model.run(&NdTensor::from(batch)).unwrap();
    assert_eq!(ours.len(), theirs.len());
    let mut worst = 0f32;
    for ((a, b), (name, _, shape)) in ours.iter().zip(&theirs).zip(&network.outputs) {
        assert_eq!(a.shape(), b.shape(), "{name}");
        assert_eq!(a.shape()[1..], shape[..], "{name}");
        let host = |t: &NdTensor| t.flat().clone().into_data().try_into_vec::<f32>().unwrap();
        let (a, b) = (host(a), host(b));
        let scale = a.iter().fold(1e-6f32, |m, v| m.max(v.abs()));
        worst = a.iter().zip(&b).fold(worst, |m, (a, b)| m.max((a - b).abs() / scale));
    }
    worst
}

fn split(network: &Network, values: &[f32], device: &Device) -> Parameters {
    let zeros = network.parameters.iter().map(|p| vec![0.0; p.len()]).collect();
    let parameters = Parameters::new(network.parameters.clone(), zeros, device);
    parameters.write(values).unwrap();
    parameters
}

#[test]
fn the_onnx_file_of_the_embedder_gives_what_the_training_graph_gives() {
    let difference = difference(&embedder::network());
    assert!(difference < 1e-5, "{difference}");
}

#[test]
fn the_onnx_file_of_the_detector_gives_what_the_training_graph_gives() {
    let difference = difference(&detector::network().0);
    assert!(difference < 1e-5, "{difference}");
}
