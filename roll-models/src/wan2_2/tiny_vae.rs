//! Keys and shapes of small VAEs, in official names. Stands in until the VAE itself can list its weights.

type Shapes = Vec<(String, Vec<usize>)>;

/// Wan2.1 VAE, 6 channels at full size, 16 in the latents.
pub fn vae_21() -> Shapes {
    let (d, z) = (6, 16);
    let mut all = ends("encoder", [3, d, 4 * d, 2 * z]);
    all.extend(ends("decoder", [z, 4 * d, d, 3]));
    all.extend(latent(z));
    let mut n = 0;
    for (stage, [input, out]) in [[d, d], [d, 2 * d], [2 * d, 4 * d], [4 * d, 4 * d]].into_iter().enumerate() {
        for (block, input) in [input, out].into_iter().enumerate() {
            all.extend(residual(&format!("encoder.downsamples.{}", n + block), input, out));
        }
        if stage < 3 {
            all.extend(resample(&format!("encoder.downsamples.{}", n + 2), [out, out], (stage > 0).then_some(out)));
        }
        n += 3;
    }
    let mut n = 0;
    for (stage, [input, out]) in [[4 * d, 4 * d], [2 * d, 4 * d], [2 * d, 2 * d], [d, d]].into_iter().enumerate() {
        for (block, input) in [input, out, out].into_iter().enumerate() {
            all.extend(residual(&format!("decoder.upsamples.{}", n + block), input, out));
        }
        if stage < 3 {
            let time = (stage < 2).then_some(2 * out);
            all.extend(resample(&format!("decoder.upsamples.{}", n + 3), [out, out / 2], time));
        }
        n += 4;
    }
    all
}

/// Wan2.2 VAE, 4 and 6 channels at full size, 48 in the latents.
pub fn vae_22() -> Shapes {
    let (d, e, z) = (4, 6, 48);
    let mut all = ends("encoder", [12, d, 4 * d, 2 * z]);
    all.extend(ends("decoder", [z, 4 * e, e, 12]));
    all.extend(latent(z));
    for (stage, [input, out]) in [[d, d], [d, 2 * d], [2 * d, 4 * d], [4 * d, 4 * d]].into_iter().enumerate() {
        let name = |n: usize| format!("encoder.downsamples.{stage}.downsamples.{n}");
        all.extend(residual(&name(0), input, out));
        all.extend(residual(&name(1), out, out));
        if stage < 3 {
            all.extend(resample(&name(2), [out, out], (stage > 0).then_some(out)));
        }
    }
    for (stage, [input, out]) in [[4 * e, 4 * e], [4 * e, 4 * e], [4 * e, 2 * e], [2 * e, e]].into_iter().enumerate() {
        let name = |n: usize| format!("decoder.upsamples.{stage}.upsamples.{n}");
        for (n, input) in [input, out, out].into_iter().enumerate() {
            all.extend(residual(&name(n), input, out));
        }
        if stage < 3 {
            all.extend(resample(&name(3), [out, out], (stage < 2).then_some(2 * out)));
        }
    }
    all
}

/// First convolution, middle and head of a half: channels of its input, first and last level, and output.
fn ends(half: &str, [input, first, last, output]: [usize; 4]) -> Shapes {
    let middle = if half == "encoder" { last } else { first };
    let name = |part: &str| format!("{half}.{part}");
    let mut all = conv(&name("conv1"), first, &[input, 3, 3, 3]);
    for block in ["middle.0", "middle.2"] {
        all.extend(residual(&name(block), middle, middle));
    }
    all.push((name("middle.1.norm.gamma"), vec![middle, 1, 1]));
    all.extend(conv(&name("middle.1.to_qkv"), 3 * middle, &[middle, 1, 1]));
    all.extend(conv(&name("middle.1.proj"), middle, &[middle, 1, 1]));
    all.push((name("head.0.gamma"), vec![last, 1, 1, 1]));
    all.extend(conv(&name("head.2"), output, &[last, 3, 3, 3]));
    all
}

fn latent(z: usize) -> Shapes {
    let mut all = conv("conv1", 2 * z, &[2 * z, 1, 1, 1]);
    all.extend(conv("conv2", z, &[z, 1, 1, 1]));
    all
}

fn residual(name: &str, input: usize, out: usize) -> Shapes {
    let mut all = vec![(format!("{name}.residual.0.gamma"), vec![input, 1, 1, 1])];
    all.extend(conv(&format!("{name}.residual.2"), out, &[input, 3, 3, 3]));
    all.push((format!("{name}.residual.3.gamma"), vec![out, 1, 1, 1]));
    all.extend(conv(&format!("{name}.residual.6"), out, &[out, 3, 3, 3]));
    if input != out {
        all.extend(conv(&format!("{name}.shortcut"), out, &[input, 1, 1, 1]));
    }
    all
}

/// A change of size, and of the number of frames where `time` gives the channels of its convolution.
fn resample(name: &str, [input, out]: [usize; 2], time: Option<usize>) -> Shapes {
    let mut all = conv(&format!("{name}.resample.1"), out, &[input, 3, 3]);
    if let Some(channels) = time {
        all.extend(conv(&format!("{name}.time_conv"), channels, &[input, 3, 1, 1]));
    }
    all
}

fn conv(name: &str, out: usize, kernel: &[usize]) -> Shapes {
    let shape = [&[out], kernel].concat();
    vec![(format!("{name}.weight"), shape), (format!("{name}.bias"), vec![out])]
}
