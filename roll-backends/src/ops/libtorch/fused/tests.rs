//! The fused kernels, compared with the same formulas in f64: on the CPU, where fibres emulate the threads of a GPU,
//! and on a GPU.
#![allow(clippy::unwrap_used)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::process::Command;
use std::sync::OnceLock;

use super::nvrtc::{Nvrtc, SOURCE};
use super::*;

const EPS: f64 = 1e-6;
/// Half a unit in the last place of bf16, relative.
const BF16: f64 = 1.0 / 256.0;
/// Widths and numbers of heads, some of which are not multiples of a warp's or block's size.
const WIDTHS: [(i64, i64); 6] = [(8, 1), (40, 5), (128, 2), (1536, 12), (5120, 40), (13_824, 108)];

/// Channel counts, including those of the published VAEs.
const CHANNELS: [i64; 6] = [8, 96, 128, 192, 384, 512];

type Emulate = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_uint, *const c_uint, c_int) -> c_int;

/// Runs the kernels on the CPU: a C compiler builds them from the same source. The threads of a block take turns, in
/// ascending or descending order.
#[derive(Clone, Copy)]
struct Emulation {
    emulate: Emulate,
    from_the_last: bool,
}

impl Launcher for Emulation {
    fn launch(&self, launch: &mut Launch) -> Result<(), String> {
        let (name, grid, block) = (launch.kernel.0, launch.shape.grid, launch.shape.block);
        let mut parameters = launch.parameters();
        // SAFETY: the parameters are those of the kernel and point to CPU tensors.
        let code = unsafe {
            (self.emulate)(
                name.as_ptr(),
                parameters.as_mut_ptr(),
                grid,
                block.as_ptr(),
                c_int::from(self.from_the_last),
            )
        };
        assert_eq!(code, 0, "{name:?}: some threads of a block do not reach the barrier of this line of kernels.cu");
        Ok(())
    }
}

/// The emulation; `None`, with a skip message, without a C compiler.
fn emulation() -> Option<Emulation> {
    static BUILT: OnceLock<Result<Emulate, String>> = OnceLock::new();
    match BUILT.get_or_init(build) {
        Ok(emulate) => Some(Emulation { emulate: *emulate, from_the_last: false }),
        Err(error) => roll_testing::skip!(format!("kernels are not run without a C compiler: {error}"), needs = "cc"),
    }
}

fn build() -> Result<Emulate, String> {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("emulate.c"), include_str!("emulate.c")).unwrap();
    std::fs::write(at("kernels.cu"), SOURCE).unwrap();
    let built = Command::new("cc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-O2", "-shared", "-fPIC", "-o"])
        .args([at("libkernels.so"), at("emulate.c")])
        .arg("-lm")
        .output()
        .map_err(|error| format!("cc: {error}"))?;
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let library = crate::library::open(&at("libkernels.so"))?;
    // SAFETY: the signature is that of emulate.c.
    let emulate = *unsafe { library.get::<Emulate>("emulate") }.map_err(|e| e.to_string())?;
    std::mem::forget(library);
    Ok(emulate)
}

/// Deterministic numbers between -4 and 4.
fn noise(rows: i64, width: i64, seed: i64, device: Device) -> Tensor {
    let places = Tensor::arange(rows * width, (Kind::Double, device)) + seed * 1_000_003;
    ((places * 12.9898).sin() * 43_758.545_3).frac().reshape([rows, width]) * 4.0
}

fn mean(x: &Tensor) -> Tensor {
    x.mean_dim([1i64].as_slice(), true, None::<Kind>)
}

/// Asserts that every number of `found` is within `relative` of its exact value, with a margin for cancellation in f32.
fn assert_near(what: &str, found: &Tensor, exact: &Tensor, relative: f64) {
    assert_eq!(found.size(), exact.size(), "{what}");
    let exact_size = exact.abs();
    let room = &exact_size * relative + exact_size.max() * 2e-6;
    let excess = (found.to_kind(Kind::Double) - exact).abs() - room;
    assert_eq!(f64::try_from(excess.isfinite().logical_not().sum(Kind::Double)).unwrap(), 0.0, "{what}: not finite");
    let excess = f64::try_from(excess.max()).unwrap();
    assert!(excess <= 0.0, "{what}: error exceeds the rounding bound by {excess:e}");
}

/// Rotates the pairs of `[L, H * d]` by angles, `[L, d / 2]`.
fn rotated(x: &Tensor, [cos, sin]: [&Tensor; 2], heads: i64) -> Tensor {
    let (rows, half) = (x.size()[0], cos.size()[1]);
    let pairs = x.reshape([rows, heads, half, 2]);
    let (even, odd) = (pairs.select(3, 0), pairs.select(3, 1));
    let (cos, sin) = (cos.unsqueeze(1), sin.unsqueeze(1));
    Tensor::stack(&[&even * &cos - &odd * &sin, even * sin + odd * cos], 3).reshape(x.size())
}

/// Checks the norms and gates at one shape, with operands shared by all rows or `per_row`.
fn check_layers<L: Launcher>(ops: &FusedOps<L>, device: Device, [rows, width]: [i64; 2], per_row: bool) {
    let what = |name: &str| format!("{name} of [{rows}, {width}], operands per row: {per_row}");
    let operands = if per_row { rows } else { 1 };
    let float = |rows: i64, seed: i64| noise(rows, width, seed, device).to_kind(Kind::Float);
    let double = |x: &Tensor| x.to_kind(Kind::Double);
    let (x, gain, shift) = (float(rows, 1) + 3.0, float(operands, 2), float(operands, 3));
    let (x64, gain64) = (double(&x), double(&gain));

    let (y, moments) = ops.layer_norm(&x, &gain, &shift, EPS).expect("supported");
    assert_eq!((y.kind(), moments.kind()), (Kind::BFloat16, Kind::Float));
    let centre = mean(&x64);
    let inverse = (mean(&(&x64 - &centre).square()) + EPS).rsqrt();
    let normed = (&x64 - &centre) * &inverse;
    assert_near(&what("layer_norm"), &y, &(&normed * &gain64 + double(&shift)), BF16);
    assert_near(&what("mean"), &moments.narrow(1, 0, 1), &centre, 1e-6);
    assert_near(&what("inverse"), &moments.narrow(1, 1, 1), &inverse, 1e-6);

    let d_y = float(rows, 4).to_kind(Kind::BFloat16);
    let d_x = ops.layer_norm_pull(&x, &gain, &moments, &d_y).expect("supported");
    let d = double(&d_y) * &gain64;
    let exact = (&d - mean(&d) - &normed * mean(&(&d * &normed))) * &inverse;
    assert_eq!(d_x.kind(), Kind::Float);
    assert_near(&what("layer_norm_pull"), &d_x, &exact, 0.0);

    for gate in [Some(&gain), None] {
        let scale = gate.map_or(Tensor::ones([1, width], (Kind::Double, device)), double);
        let z = ops.gated_add(&x, &d_y, gate).expect("supported");
        assert_eq!(z.kind(), Kind::Float);
        assert_near(&what("gated_add"), &z, &(&x64 + double(&d_y) * &scale), 0.0);
        let d_y = ops.gate_pull(&x, gate).expect("supported");
        assert_eq!(d_y.kind(), Kind::BFloat16);
        assert_near(&what("gate_pull"), &d_y, &(&x64 * scale), BF16);
    }
}

/// Checks the RMS norm at one shape, with and without angles.
fn check_rms<L: Launcher>(ops: &FusedOps<L>, device: Device, [rows, width]: [i64; 2], heads: i64) {
    let what = |name: &str| format!("{name} of [{rows}, {width}], {heads} heads");
    let double = |x: &Tensor| x.to_kind(Kind::Double);
    let x = noise(rows, width, 1, device).to_kind(Kind::BFloat16);
    let d_y = noise(rows, width, 2, device).to_kind(Kind::BFloat16);
    let gain = noise(1, width, 3, device).to_kind(Kind::Float);
    let angles = noise(rows, width / heads / 2, 4, device);
    let (cos, sin) = (angles.cos().to_kind(Kind::Float), angles.sin().to_kind(Kind::Float));
    let (cos64, sin64) = (double(&cos), double(&sin));
    let x64 = double(&x);
    let exact_inverse = (mean(&x64.square()) + EPS).rsqrt();
    for rotation in [Some([&cos, &sin]), None] {
        let (y, inverse) = ops.rms_rope(&x, &gain, EPS, rotation, heads).expect("supported");
        let d_x = ops.rms_rope_pull(&x, &gain, &inverse, rotation, heads, &d_y).expect("supported");
        assert_eq!((y.kind(), inverse.kind(), d_x.kind()), (Kind::BFloat16, Kind::Float, Kind::BFloat16));
        let scaled = &x64 * &exact_inverse * double(&gain);
        let (exact, d) = match rotation {
            Some(_) => (rotated(&scaled, [&cos64, &sin64], heads), rotated(&double(&d_y), [&cos64, &-&sin64], heads)),
            None => (scaled, double(&d_y)),
        };
        assert_near(&what("rms_rope"), &y, &exact, BF16);
        assert_near(&what("inverse"), &inverse, &exact_inverse, 1e-6);
        let d = d * double(&gain);
        let exact = (&d - &x64 * exact_inverse.square() * mean(&(&d * &x64))) * &exact_inverse;
        assert_near(&what("rms_rope_pull"), &d_x, &exact, BF16);
    }
}

/// Checks the channel norm at one shape, in f32 and bf16. The first row is zero.
fn check_channel_norm<L: Launcher>(ops: &FusedOps<L>, device: Device, [rows, width]: [i64; 2]) {
    const LEAST: f32 = 1e-12;
    let double = |x: &Tensor| x.to_kind(Kind::Double);
    let gain = noise(1, width, 3, device).to_kind(Kind::Float);
    for (kind, relative) in [(Kind::Float, 4e-6), (Kind::BFloat16, BF16)] {
        let what = |name: &str| format!("{name} of [{rows}, {width}] in {kind:?}");
        let (mut x, d_y) = (noise(rows, width, 1, device).to_kind(kind), noise(rows, width, 2, device).to_kind(kind));
        if rows > 1 {
            let _ = x.narrow(0, 0, 1).zero_();
        }
        // Writes into a part of a larger tensor.
        let larger = Tensor::full([rows + 2, width], 7.0, (kind, device));
        let y = larger.narrow(0, 2, rows);
        ops.channel_norm_silu(&x, &gain, LEAST, &y).expect("supported");
        let d_x = ops.channel_norm_silu_pull(&x, &gain, LEAST, &d_y).expect("supported");
        assert_eq!(d_x.kind(), kind);
        assert_eq!(f64::try_from(larger.narrow(0, 0, 2).sum(Kind::Double)).unwrap(), 14.0 * width as f64);
        x = double(&x);
        let norms = x.square().sum_dim_intlist([1i64].as_slice(), true, None::<Kind>).sqrt();
        let factors = norms.clamp_min(f64::from(LEAST)).reciprocal() * (width as f64).sqrt();
        let normed = &x * &factors;
        let scaled = &normed * double(&gain);
        let sigmoid = scaled.sigmoid();
        assert_near(&what("channel_norm"), &y, &(&scaled * &sigmoid), relative);
        let slope = &sigmoid + &scaled * &sigmoid * (1.0 - &sigmoid);
        let d = double(&d_y) * slope * double(&gain);
        let exact = (&d - &normed * mean(&(&d * &normed))) * &factors;
        // A row of zeros is divided by nearly zero, so its gradient is only checked to be finite.
        let from = i64::from(rows > 1);
        let but_first = |x: &Tensor| x.narrow(0, from, rows - from);
        assert_near(&what("channel_norm_pull"), &but_first(&d_x), &but_first(&exact), relative);
        let finite = f64::try_from(d_x.isfinite().all().to_kind(Kind::Double)).unwrap();
        assert_eq!(finite, 1.0, "{}", what("channel_norm_pull"));
    }
}

/// Asserts an update of `count` parameters.
fn check_adam<L: Launcher>(ops: &FusedOps<L>, device: Device, count: i64) {
    let line = |seed: i64| noise(1, count, seed, device).to_kind(Kind::Float).reshape([count]);
    let [p, g, m] = [1, 2, 3].map(line);
    let v = line(4).square() + 0.01;
    let update = AdamUpdate {
        scale: [0.5, 0.75],
        beta_2: 0.999,
        rest: [0.1, 0.001],
        eps: 1e-8,
        step_size: 1e-2,
        root_correction: 0.25,
        keep: 0.999,
    };
    let found = ops.adam([&p, &g, &m, &v], &update).expect("supported");
    let [p, g, m, v] = [&p, &g, &m, &v].map(|x| x.to_kind(Kind::Double));
    let g = g * 0.375;
    let first = &m + (&g - &m) * f64::from(update.rest[0]);
    let second = &v * f64::from(update.beta_2) + g.square() * f64::from(update.rest[1]);
    let (step, eps) = (f64::from(update.step_size), f64::from(update.eps));
    let new = &p * f64::from(update.keep) - &first / (second.sqrt() / 0.25 + eps) * step;
    for (name, found, exact) in [("p", &found[0], &new), ("m", &found[1], &first), ("v", &found[2], &second)] {
        assert_near(&format!("adam of {count}: {name}"), found, exact, 1e-6);
    }
}

#[test]
fn fused_adam_matches_f64() {
    let Some(emulation) = emulation() else { return };
    for count in [1, 3, 4, 5, 1023, 1024, 1027, 5000] {
        check_adam(&FusedOps(emulation), Device::Cpu, count);
    }
}

#[test]
fn fused_channel_norms_match_f64() {
    let Some(emulation) = emulation() else { return };
    for width in CHANNELS {
        for rows in [1, 3, 37] {
            for from_the_last in [false, true] {
                check_channel_norm(&FusedOps(Emulation { from_the_last, ..emulation }), Device::Cpu, [rows, width]);
            }
        }
    }
}

#[test]
fn fused_kernels_match_f64() {
    let Some(emulation) = emulation() else { return };
    let ops = FusedOps(emulation);
    for (width, heads) in WIDTHS {
        for rows in [1, 3, 37] {
            if rows * width > 200_000 {
                continue;
            }
            for per_row in [false, true] {
                check_layers(&ops, Device::Cpu, [rows, width], per_row);
            }
            check_rms(&ops, Device::Cpu, [rows, width], heads);
        }
    }
}

#[test]
fn fused_bits_do_not_depend_on_thread_order() {
    let Some(emulation) = emulation() else { return };
    for (rows, width, heads) in [(5, 40, 5), (3, 1536, 12), (1, 5120, 40)] {
        let x = noise(rows, width, 1, Device::Cpu).to_kind(Kind::Float);
        let narrow = noise(rows, width, 2, Device::Cpu).to_kind(Kind::BFloat16);
        let gain = noise(1, width, 3, Device::Cpu).to_kind(Kind::Float);
        let all = |from_the_last: bool| {
            let emulation = Emulation { from_the_last, ..emulation };
            let ops = FusedOps(emulation);
            let (y, moments) = ops.layer_norm(&x, &gain, &gain, EPS).unwrap();
            let d_x = ops.layer_norm_pull(&x, &gain, &moments, &narrow).unwrap();
            let (rotated, inverse) = ops.rms_rope(&narrow, &gain, EPS, None, heads).unwrap();
            let d_narrow = ops.rms_rope_pull(&narrow, &gain, &inverse, None, heads, &rotated).unwrap();
            [y, moments, d_x, rotated, inverse, d_narrow]
        };
        for (one, other) in all(false).iter().zip(&all(true)) {
            assert!(one.equal(other), "{rows}, {width}");
        }
    }
}

#[test]
fn fused_kernels_reject_unsupported_operands() {
    struct Nothing;
    impl Launcher for Nothing {
        fn launch(&self, _: &mut Launch) -> Result<(), String> {
            Ok(())
        }
    }
    let ops = FusedOps(Nothing);
    let zeros = |size: [i64; 2], kind| Tensor::zeros(size, (kind, Device::Cpu));
    let (x, y, row) = (zeros([4, 16], Kind::Float), zeros([4, 16], Kind::BFloat16), zeros([1, 16], Kind::Float));
    let two = zeros([2, 16], Kind::Float);
    assert!(ops.gated_add(&x, &y, Some(&row)).is_some());
    assert!(ops.gated_add(&x, &x, Some(&row)).is_none(), "a sum that is not bf16");
    assert!(ops.gated_add(&x, &y, Some(&two)).is_none(), "a gate of two rows for four");
    assert!(ops.gated_add(&x, &y, Some(&row.expand([4, 16], false))).is_none(), "rows that share memory");
    assert!(ops.gate_pull(&x.to_kind(Kind::Double), None).is_none(), "f64");
    assert!(ops.gate_pull(&zeros([4, 12], Kind::Float), None).is_none(), "a width that is not a multiple of 8");
    assert!(ops.gate_pull(&zeros([16, 8], Kind::Float).tr(), None).is_none(), "a transposed matrix");
    assert!(ops.gate_pull(&zeros([0, 16], Kind::Float), None).is_none(), "no rows");
    let misplaced = Tensor::zeros([65], (Kind::Float, Device::Cpu)).narrow(0, 1, 64).view([4, 16]);
    assert!(ops.gate_pull(&misplaced, None).is_none(), "memory that is not 16-byte aligned");
    let wide = i64::from(MAX_WIDTH) + 8;
    let wide_row = zeros([1, wide], Kind::Float);
    assert!(ops.layer_norm(&wide_row, &wide_row, &wide_row, EPS).is_none(), "a row that does not fit in registers");
    let angles = zeros([4, 4], Kind::Float);
    assert!(ops.rms_rope(&y, &row, EPS, Some([&angles; 2]), 2).is_some());
    assert!(ops.rms_rope(&y, &row, EPS, Some([&angles; 2]), 1).is_none(), "angles of another head");
    let two = zeros([4, 2], Kind::Float);
    assert!(ops.rms_rope(&y, &row, EPS, Some([&two; 2]), 4).is_none(), "a head width that is not a multiple of 8");
    // Tensors on the CPU are not supported.
    assert!(super::ops(&x).is_none() && super::ops_in_bf16(&y).is_none());
}

/// `tests/kernels.rs` compiles them for further architectures, and counts spills.
#[test]
fn fused_kernels_compile_to_machine_code_and_ptx() {
    let nvrtc = match Nvrtc::load() {
        Ok(nvrtc) => nvrtc,
        Err(reason) => roll_testing::skip!(reason, needs = "nvrtc"),
    };
    assert!(nvrtc.compile(SOURCE, "sm_80").unwrap().starts_with(b"\x7fELF"));
    let ptx = String::from_utf8(nvrtc.compile(SOURCE, "compute_80").unwrap()).unwrap();
    for kernel in Kernel::ALL {
        let entry = format!(".entry {}(", kernel.0.to_str().unwrap());
        assert!(ptx.contains(&entry), "{entry}");
    }
    let refused = nvrtc.compile("nonsense", "sm_80").err().unwrap_or_default();
    assert!(refused.contains("nonsense"), "{refused}");
}

/// A GPU with the kernels compiled for it; `None`, with a skip message, without a GPU.
fn usable_gpu() -> Option<Arc<driver::Gpu>> {
    if !tch::Cuda::is_available() {
        roll_testing::skip!("libtorch finds no GPU", needs = "gpu");
    }
    Some(driver::gpu(0).expect("the kernels compile on any GPU that torch supports (the warning above has the reason)"))
}

#[test]
fn fused_kernels_match_f64_on_a_gpu() {
    let Some(gpu) = usable_gpu() else { return };
    let (ops, device) = (FusedOps(gpu.clone()), Device::Cuda(0));
    for (width, heads) in WIDTHS {
        for rows in [1, 3, 37, 1364] {
            for per_row in [false, true] {
                check_layers(&ops, device, [rows, width], per_row);
            }
            check_rms(&ops, device, [rows, width], heads);
        }
    }
    for (width, rows) in CHANNELS.into_iter().flat_map(|width| [1, 3, 37, 57_601].map(|rows| (width, rows))) {
        check_channel_norm(&ops, device, [rows, width]);
    }
    for count in [1, 5, 1027, 5120 * 32] {
        check_adam(&ops, device, count);
    }
    for kernel in Kernel::ALL {
        let [spilled, registers] = gpu.footprint(kernel).unwrap();
        eprintln!("{kernel:?}: {registers} registers, {spilled} bytes spilled");
        assert_eq!(spilled, 0, "{kernel:?}");
    }
    // The block of a 14B model at 81 frames of 480 x 480.
    check_layers(&ops, device, [18_900, 5120], false);
    check_rms(&ops, device, [18_900, 5120], 40);
}

#[test]
fn fused_kernels_run_in_new_threads() {
    let Some(_) = usable_gpu() else { return };
    let options = (Kind::Float, Device::Cuda(0));
    let x = Tensor::ones([37, 64], options);
    let halves = std::thread::spawn(move || super::ops(&x)?.gate_pull(&x, Some(&Tensor::full([1, 64], 0.5, options))))
        .join()
        .unwrap();
    let sum = halves.expect("supported").sum(Kind::Float);
    assert_eq!(f64::try_from(sum).unwrap(), 37.0 * 64.0 * 0.5);
}

#[test]
#[ignore = "a measurement: prints the bandwidth of each kernel on a GPU"]
fn fused_bandwidth() {
    let Some(gpu) = usable_gpu() else { return };
    let (ops, device) = (FusedOps(gpu.clone()), Device::Cuda(0));
    let [rows, width] = [18_900, 5120];
    let x = Tensor::randn([rows, width], (Kind::Float, device));
    let narrow = x.to_kind(Kind::BFloat16);
    let row = Tensor::ones([1, width], (Kind::Float, device));
    let angle = Tensor::ones([rows, 64], (Kind::Float, device));
    let rotation = Some([&angle, &angle]);
    let (_, moments) = ops.layer_norm(&x, &row, &row, EPS).unwrap();
    let (_, inverse) = ops.rms_rope(&narrow, &row, EPS, rotation, 40).unwrap();
    let measure = |name: &str, bytes_of_a_number: i64, run: &dyn Fn()| {
        (0..3).for_each(|_| run());
        tch::Cuda::synchronize(0);
        let start = std::time::Instant::now();
        (0..20).for_each(|_| run());
        tch::Cuda::synchronize(0);
        let seconds = start.elapsed().as_secs_f64() / 20.0;
        let rate = (rows * width * bytes_of_a_number) as f64 / seconds / 1e12;
        eprintln!("{name:16} {:7.1} us  {rate:.2} TB/s", seconds * 1e6);
    };
    // The ceiling.
    let copy = std::cell::RefCell::new(x.empty_like());
    measure("copy", 8, &|| copy.borrow_mut().copy_(&x));
    measure("layer_norm", 6, &|| drop(ops.layer_norm(&x, &row, &row, EPS).unwrap()));
    measure("layer_norm_pull", 10, &|| drop(ops.layer_norm_pull(&x, &row, &moments, &narrow).unwrap()));
    measure("rms_rope", 4, &|| drop(ops.rms_rope(&narrow, &row, EPS, rotation, 40).unwrap()));
    let pull = || drop(ops.rms_rope_pull(&narrow, &row, &inverse, rotation, 40, &narrow).unwrap());
    measure("rms_rope_pull", 6, &pull);
    measure("gated_add", 10, &|| drop(ops.gated_add(&x, &narrow, Some(&row)).unwrap()));
    // About the size (within a tenth) of a chunk in the last stage of the VAE's decoder at 480 x 480.
    let (volume, channels) = (x.reshape([rows * width / 96, 96]), row.narrow(1, 0, 96).contiguous());
    for (volume, size) in [(&volume.to_kind(Kind::BFloat16), 2), (&volume, 4)] {
        let to = volume.empty_like();
        let name = |name: &str| format!("{name}, {:?}", volume.kind());
        let norm = || ops.channel_norm_silu(volume, &channels, 1e-12, &to).unwrap();
        measure(&name("channel_norm"), 2 * size, &norm);
        let pull = || drop(ops.channel_norm_silu_pull(volume, &channels, 1e-12, &to).unwrap());
        measure(&name("channel_norm_pull"), 3 * size, &pull);
    }
    measure("gate_pull", 6, &|| drop(ops.gate_pull(&x, Some(&row)).unwrap()));
}
