//! Times of the fused operators and of a Wan DiT block made of them, for comparison with `bench/torch_ops.py`.
//!
//! Usage: `operators [CASE_SUBSTRING] [SECONDS]`, prints `case, forward: wall, CPU; forward and backward: wall, CPU` in
//! seconds, tab-separated, each the best of several runs. CPU time is that of all threads; on a busy machine it is the
//! steadier of the two.

use std::hint::black_box;
use std::time::Instant;

use burn_tensor::ops::ConvOptions;
use burn_tensor::{Device, Distribution, Tensor, module};
use roll_backends::ops;

const DIM: usize = 1536;
const FFN: usize = 8960;
const HEADS: usize = 12;
const TOKENS: usize = 1024;
const TEXT: usize = 512;
const RANK: usize = 32;

fn best(mut run: impl FnMut()) -> String {
    let budget = std::env::args().nth(2).and_then(|s| s.parse().ok()).unwrap_or(1.0);
    run();
    let (start, mut wall, mut cpu, mut count) = (Instant::now(), f64::INFINITY, f64::INFINITY, 0);
    while count < 3 || (start.elapsed().as_secs_f64() < budget && count < 40) {
        let (t, c) = (Instant::now(), cpu_seconds());
        run();
        wall = wall.min(t.elapsed().as_secs_f64());
        cpu = cpu.min(cpu_seconds() - c);
        count += 1;
    }
    format!("{wall:.6}\t{cpu:.6}")
}

/// What all threads of this process have used so far (0 where the system does not say).
fn cpu_seconds() -> f64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return 0.0 };
    let nanoseconds = |path: std::path::PathBuf| -> Option<f64> {
        std::fs::read_to_string(path.join("schedstat")).ok()?.split_whitespace().next()?.parse().ok()
    };
    tasks.flatten().filter_map(|task| nanoseconds(task.path())).sum::<f64>() * 1e-9
}

struct Bench {
    device: Device,
    filter: String,
}

fn flat<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    let n = x.dims().iter().product::<usize>();
    x.reshape([n])
}

impl Bench {
    fn random<const D: usize>(&self, shape: [usize; D]) -> Tensor<D> {
        Tensor::random(shape, Distribution::Normal(0.0, 1.0), &self.device)
    }

    /// Inputs travel flat, so that one list holds every rank.
    fn case(
        &self,
        name: &str,
        inputs: Vec<Tensor<1>>,
        tracked: &[usize],
        function: impl Fn(&[Tensor<1>]) -> Tensor<1>,
    ) {
        if !name.contains(&self.filter) {
            return;
        }
        let n = function(&inputs).dims()[0];
        let cotangent = self.random([n]);
        let forward = best(|| {
            black_box(function(&inputs));
        });
        let both = best(|| {
            let leaves: Vec<_> = inputs
                .iter()
                .enumerate()
                .map(|(i, x)| if tracked.contains(&i) { x.clone().autodiff().require_grad() } else { x.clone() })
                .collect();
            let mut gradients = ops::seed(function(&leaves), cotangent.clone()).backward();
            for &i in tracked {
                black_box(leaves[i].grad_remove(&mut gradients));
            }
        });
        println!("{name}\t{forward}\t{both}");
    }
}

struct Linear {
    weight: Tensor<2>,
    bias: Tensor<1>,
}

/// q, k, v, o of self attention, the same of cross attention, ffn.0, ffn.2.
struct Block {
    linears: Vec<Linear>,
    gain: Tensor<1>,
    one: Tensor<2>,
    zero: Tensor<2>,
    modulation: Tensor<2>,
    cos: Tensor<2>,
    sin: Tensor<2>,
}

impl Block {
    fn new(bench: &Bench) -> Self {
        let linears = sizes()
            .into_iter()
            .map(|[inputs, outputs]| Linear {
                weight: bench.random([outputs, inputs]).div_scalar((inputs as f64).sqrt()),
                bias: bench.random([outputs]).mul_scalar(0.1),
            })
            .collect();
        let angles = bench.random([TOKENS, DIM / HEADS / 2]);
        Self {
            linears,
            gain: Tensor::ones([DIM], &bench.device),
            one: Tensor::ones([1, DIM], &bench.device),
            zero: Tensor::zeros([1, DIM], &bench.device),
            modulation: bench.random([6, DIM]).mul_scalar(0.1),
            cos: angles.clone().cos(),
            sin: angles.sin(),
        }
    }

    fn forward(&self, x: Tensor<2>, text: Tensor<2>, e: Tensor<2>, lora: &[[Tensor<2>; 2]]) -> Tensor<2> {
        let linear = |i: usize, x: Tensor<2>| {
            let Linear { weight, bias } = &self.linears[i];
            let [down, up] = lora[i].clone();
            ops::linear_lora(x, weight.clone(), Some(bias.clone()), down, up, 1.0)
        };
        let rms_rope = |x, angles| ops::rms_rope(x, self.gain.clone(), angles, HEADS, 1e-6);
        let (rms, turned) = (|x| rms_rope(x, None), |x| rms_rope(x, Some([self.cos.clone(), self.sin.clone()])));
        let e = e + self.modulation.clone();
        let chunk = |i: usize| e.clone().narrow(0, i, 1);
        let h = ops::layer_norm(x.clone(), chunk(1) + 1.0, chunk(0), 1e-6);
        let (q, k, v) = (turned(linear(0, h.clone())), turned(linear(1, h.clone())), linear(2, h));
        let x = ops::gated_add(x, linear(3, ops::attention(q, k, v, HEADS)), Some(chunk(2)));
        let h = ops::layer_norm(x.clone(), self.one.clone(), self.zero.clone(), 1e-6);
        let (q, k, v) = (rms(linear(4, h)), rms(linear(5, text.clone())), linear(6, text));
        let x = ops::gated_add(x, linear(7, ops::attention(q, k, v, HEADS)), None);
        let h = ops::layer_norm(x.clone(), chunk(4) + 1.0, chunk(3), 1e-6);
        ops::gated_add(x, linear(9, ops::gelu_tanh(linear(8, h))), Some(chunk(5)))
    }
}

fn sizes() -> Vec<[usize; 2]> {
    let mut sizes = vec![[DIM, DIM]; 8];
    sizes.extend([[DIM, FFN], [FFN, DIM]]);
    sizes
}

fn main() {
    let bench = Bench { device: Device::flex(), filter: std::env::args().nth(1).unwrap_or_default() };
    let r = |n: usize| bench.random([n]);
    let [square, wider, deeper] = [[TOKENS, DIM, DIM], [TOKENS, DIM, FFN], [TOKENS, FFN, DIM]];
    // Those of a picture's transformer, and of many and of few rows.
    let others = [[197, 768, 3072], [197, 3072, 768], [18_900, 128, 128], [12, DIM, DIM], [1, DIM, DIM]];
    for [tokens, inputs, outputs] in [square, wider, deeper].into_iter().chain(others) {
        let xwb = || vec![r(tokens * inputs), r(outputs * inputs), r(outputs)];
        bench.case(&format!("linear {tokens} {inputs}x{outputs}"), xwb(), &[0], |x| {
            flat(ops::linear(
                x[0].clone().reshape([tokens, inputs]),
                x[1].clone().reshape([outputs, inputs]),
                Some(x[2].clone()),
            ))
        });
        bench.case(&format!("burn linear {tokens} {inputs}x{outputs}"), xwb(), &[0], |x| {
            let weight: Tensor<2> = x[1].clone().reshape([outputs, inputs]);
            flat(x[0].clone().reshape([tokens, inputs]).matmul(weight.transpose()) + x[2].clone().unsqueeze())
        });
    }
    bench.case("linear all 1536x8960", vec![r(TOKENS * DIM), r(FFN * DIM), r(FFN)], &[0, 1, 2], |x| {
        flat(ops::linear(x[0].clone().reshape([TOKENS, DIM]), x[1].clone().reshape([FFN, DIM]), Some(x[2].clone())))
    });
    let lora = vec![r(TOKENS * DIM), r(DIM * DIM), r(DIM), r(RANK * DIM), r(DIM * RANK)];
    bench.case("lora 1536x1536", lora, &[0, 3, 4], |x| {
        let (down, up) = (x[3].clone().reshape([RANK, DIM]), x[4].clone().reshape([DIM, RANK]));
        let (value, weight) = (x[0].clone().reshape([TOKENS, DIM]), x[1].clone().reshape([DIM, DIM]));
        flat(ops::linear_lora(value, weight, Some(x[2].clone()), down, up, 1.0))
    });
    for (name, heads, rows, keys, width) in [
        ("attention 1024x1024", HEADS, TOKENS, TOKENS, DIM),
        ("attention 1024x512", HEADS, TOKENS, TEXT, DIM),
        ("attention 1 head of 384, 1024", 1, 1024, 1024, 384),
    ] {
        bench.case(name, vec![r(rows * width), r(keys * width), r(keys * width)], &[0, 1, 2], |x| {
            let part = |i: usize, n: usize| x[i].clone().reshape([n, width]);
            flat(ops::attention(part(0, rows), part(1, keys), part(2, keys), heads))
        });
    }
    let rows = |x: &Tensor<1>| x.clone().reshape([TOKENS, DIM]);
    let row = |x: &Tensor<1>| x.clone().reshape([1, DIM]);
    bench.case("layer_norm", vec![r(TOKENS * DIM), r(DIM), r(DIM)], &[0], |x| {
        flat(ops::layer_norm(rows(&x[0]), row(&x[1]), row(&x[2]), 1e-6))
    });
    bench.case("rms_norm", vec![r(TOKENS * DIM), r(DIM)], &[0], |x| {
        flat(ops::rms_norm(rows(&x[0]), x[1].clone(), 1e-6))
    });
    let half = DIM / HEADS / 2;
    bench.case("rope", vec![r(TOKENS * DIM), r(TOKENS * half), r(TOKENS * half)], &[0], |x| {
        let angles = |i: usize| x[i].clone().reshape([TOKENS, half]);
        flat(ops::rope(rows(&x[0]), angles(1), angles(2), HEADS))
    });
    bench.case("gelu_tanh", vec![r(TOKENS * FFN)], &[0], |x| ops::gelu_tanh(x[0].clone()));
    bench.case("silu", vec![r(TOKENS * FFN)], &[0], |x| ops::silu(x[0].clone()));
    bench.case("gated_add", vec![r(TOKENS * DIM), r(TOKENS * DIM), r(DIM)], &[0, 1], |x| {
        flat(ops::gated_add(rows(&x[0]), rows(&x[1]), Some(row(&x[2]))))
    });
    let volume = || vec![r(96 * 4 * 128 * 128), r(96)];
    bench.case("channel_norm", volume(), &[0], |x| {
        flat(ops::channel_norm(x[0].clone().reshape([96, 4, 128, 128]), x[1].clone()))
    });
    bench.case("channel_norm silu", volume(), &[0], |x| {
        flat(ops::channel_norm_silu(x[0].clone().reshape([96, 4, 128, 128]), x[1].clone()))
    });
    for (name, c, t, kt, side) in [
        ("conv3d 96 k3 4+2x64x64", 96, 6, 3, 64),
        ("conv3d 384 k3 1+2x16x16", 384, 3, 3, 16),
        ("conv3d 16 k3 4+2x64x64", 16, 6, 3, 64),
        ("conv3d 32 k3 4+2x32x32", 32, 6, 3, 32),
        ("conv3d 64 k3 2+2x16x16", 64, 4, 3, 16),
        ("conv3d 64 k3 1+2x8x8", 64, 3, 3, 8),
        ("conv2d 16 8x64x64", 16, 8, 1, 64),
        ("conv2d 192 4x64x64", 192, 4, 1, 64),
    ] {
        let inputs = || vec![r(c * t * side * side), r(c * c * kt * 9), r(c)];
        bench.case(name, inputs(), &[0], |x| {
            let volume = x[0].clone().reshape([c, t, side, side]);
            flat(ops::conv3d(volume, x[1].clone().reshape([c, c, kt, 3, 3]), Some(x[2].clone()), [0, 1, 1]))
        });
        bench.case(&format!("{name}, all gradients"), inputs(), &[0, 1, 2], |x| {
            let volume = x[0].clone().reshape([c, t, side, side]);
            flat(ops::conv3d(volume, x[1].clone().reshape([c, c, kt, 3, 3]), Some(x[2].clone()), [0, 1, 1]))
        });
        bench.case(&format!("burn {name}"), inputs(), &[0], |x| {
            let options = ConvOptions::new([1; 3], [0, 1, 1], [1; 3], 1);
            let volume = x[0].clone().reshape([1, c, t, side, side]);
            flat(module::conv3d(volume, x[1].clone().reshape([c, c, kt, 3, 3]), Some(x[2].clone()), options))
        });
    }
    if "wan block".contains(&bench.filter) {
        wan_block(&bench);
    }
}

fn wan_block(bench: &Bench) {
    let block = Block::new(bench);
    let mut inputs =
        vec![bench.random([TOKENS * DIM]), bench.random([TEXT * DIM]), bench.random([6 * DIM]).mul_scalar(0.1)];
    for [i, o] in sizes() {
        inputs.push(bench.random([RANK * i]).mul_scalar(0.02));
        inputs.push(bench.random([o * RANK]).mul_scalar(0.02));
    }
    let tracked: Vec<_> = std::iter::once(0).chain(3..inputs.len()).collect();
    bench.case("wan block", inputs, &tracked, |x| {
        let lora: Vec<_> = sizes()
            .into_iter()
            .zip(x[3..].chunks_exact(2))
            .map(|([i, o], pair)| [pair[0].clone().reshape([RANK, i]), pair[1].clone().reshape([o, RANK])])
            .collect();
        let [x, text, e] = [(0, TOKENS), (1, TEXT), (2, 6)].map(|(i, n)| x[i].clone().reshape([n, DIM]));
        flat(block.forward(x, text, e, &lora))
    });
}
