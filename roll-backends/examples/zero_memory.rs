//! Memory of a rank by ZeRO stage, measured beside the formula, for 500 MB of parameters and 500 MB of frozen weights.
//!
//!     MALLOC_MMAP_THRESHOLD_=65536 cargo run --release -p roll-backends --example zero_memory -- 4     # ranks
//!
//! The variable makes glibc give freed memory back at once, so that the count is of memory that is held.
//!
//! The ranks are threads of this process; a rank's share is the growth of the process, divided by their number.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::DType;
use roll_backends::strategy::{Zero, ZeroOptions};
use roll_backends::{Resident, Sharded, WeightStore};
use roll_core::{
    Communicator, Error, Model, OptimizerConfig, ParameterParts, ParameterSpec, Result, StateDict, Strategy, Tensor,
    ThreadRanks,
};

/// Layers of 2 MB each.
const LAYERS: usize = 250;
const WIDTH: usize = 500_000;
const MB: f64 = 1e6;

/// Its gradients are made when they are taken, so that only the strategy holds any.
struct Layers {
    specs: Vec<ParameterSpec>,
    values: Vec<f32>,
}

impl Layers {
    fn new() -> Self {
        let spec = |i| ParameterSpec { name: format!("layer{i:03}"), shape: vec![WIDTH] };
        Self { specs: (0..LAYERS).map(spec).collect(), values: vec![0.5; LAYERS * WIDTH] }
    }
}

fn flat(which: Range<usize>) -> Range<usize> {
    which.start * WIDTH..which.end * WIDTH
}

impl Model for Layers {
    fn parameters(&self) -> &[ParameterSpec] {
        &self.specs
    }
    fn read_parameters(&self, out: &mut [f32]) -> Result<()> {
        self.read_part(0..LAYERS, out)
    }
    fn write_parameters(&mut self, values: &[f32]) -> Result<()> {
        self.write_part(0..LAYERS, values)
    }
    fn take_gradients(&mut self, add_into: &mut [f32]) -> Result<()> {
        self.take_gradients_part(0..LAYERS, add_into)
    }
    fn parts(&mut self) -> Option<&mut dyn ParameterParts> {
        Some(self)
    }
    fn export_adapter(&self) -> Result<BTreeMap<String, StateDict>> {
        Ok(BTreeMap::new())
    }
    fn import_adapter(&mut self, _files: &BTreeMap<String, StateDict>) -> Result<()> {
        Ok(())
    }
}

impl ParameterParts for Layers {
    fn read_part(&self, which: Range<usize>, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(&self.values[flat(which)]);
        Ok(())
    }
    fn write_part(&mut self, which: Range<usize>, values: &[f32]) -> Result<()> {
        self.values[flat(which)].copy_from_slice(values);
        Ok(())
    }
    fn take_gradients_part(&mut self, which: Range<usize>, add_into: &mut [f32]) -> Result<()> {
        add_into.iter_mut().zip(flat(which)).for_each(|(sum, i)| *sum += 1.0 / (1 + i % 97) as f32);
        Ok(())
    }
}

fn main() -> Result<()> {
    let ranks: usize = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(4);
    let whole = (LAYERS * WIDTH * 4) as f64 / MB;
    println!("{ranks} ranks, {whole:.0} MB of parameters; MB of each rank, formula and measured");
    println!("{:<6} {:>18} {:>18} {:>18}", "stage", "gradients", "optimizer", "frozen weights");
    for (stage, bf16) in [(0, false), (1, false), (2, false), (3, false), (2, true)] {
        let [gradients, optimizer, frozen] = measure(ranks, stage, bf16)?;
        let share = |divided: bool| whole / if divided { ranks as f64 } else { 1.0 };
        let cell = |formula: f64, measured: f64| format!("{formula:.0} {measured:.0} ({:.2})", measured / formula);
        println!(
            "{:<6} {:>18} {:>18} {:>18}",
            format!("{stage}{}", if bf16 { " bf16" } else { "" }),
            cell(share(stage >= 2), gradients),
            cell(if bf16 { 1.0 } else { 2.0 } * share(stage >= 1), optimizer),
            cell(share(stage >= 3), frozen),
        );
    }
    Ok(())
}

/// MB of a rank: gradients, optimizer state, frozen weights.
fn measure(ranks: usize, stage: u8, bf16_optimizer_states: bool) -> Result<[f64; 3]> {
    let device = roll_backends::device("flex")?;
    let results = ThreadRanks::run(ranks, Duration::from_secs(600), |ranks| {
        let options = ZeroOptions {
            stage,
            bf16_optimizer_states,
            reduce_bucket_size: 1 << 20,
            check_every: 0,
            ..ZeroOptions::default()
        };
        let share = |before: f64, after: f64| (after - before) / ranks.world_size() as f64;
        let mut model = Layers::new();
        let mut strategy = Zero::new(options, ranks.clone())?;
        let start = settled(strategy.ranks().all.as_ref())?;
        strategy.attach(&mut model, &OptimizerConfig::default())?;
        strategy.discard(); // writes to every page of the sums
        strategy.accumulate(&mut model)?;
        let accumulated = settled(strategy.ranks().all.as_ref())?;
        strategy.step(&mut model, 1e-3, 1.0)?;
        let stepped = settled(strategy.ranks().all.as_ref())?;

        let tensor = |i: usize| -> Result<(String, Tensor)> {
            Ok((format!("layer{i:03}"), Tensor::new(vec![i as f32; WIDTH], [WIDTH])?))
        };
        let state = (0..LAYERS).map(tensor).collect::<Result<StateDict>>()?;
        let store: Arc<dyn WeightStore> = match stage {
            3 => Arc::new(Sharded::new(&state, DType::F32, &device, ranks.clone())?),
            _ => Arc::new(Resident::new(&state, DType::F32, &device)),
        };
        drop(state);
        let loaded = settled(strategy.ranks().all.as_ref())?;
        store.segment("layer007")?;
        strategy.ranks().all.barrier()?;
        Ok([share(start, accumulated), share(accumulated, stepped), share(stepped, loaded)])
    });
    let results = results.into_iter().collect::<Result<Vec<_>>>()?;
    results.first().copied().ok_or_else(|| Error::Misuse("no ranks".into()))
}

/// Memory of the process when all ranks have come here.
fn settled(ranks: &dyn Communicator) -> Result<f64> {
    ranks.barrier()?;
    let path = "/proc/self/status";
    let text = std::fs::read_to_string(path).map_err(Error::file("read", path))?;
    let line = text.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let kib = line.and_then(|l| l.split_whitespace().next()).and_then(|v| v.parse::<f64>().ok());
    ranks.barrier()?;
    kib.map(|k| k * 1024.0 / MB).ok_or_else(|| Error::bad_file(path, "no line VmRSS"))
}
