//! Memory sizes: of GPUs, as `nvidia-smi` reports them, and of this process.

use std::process::Command;

use super::{Backend, parse};

/// Memory of the GPU that `backend` names, in bytes. `None` if the backend does not run on an NVIDIA GPU or
/// `nvidia-smi` fails.
pub fn total(backend: &str) -> Option<u64> {
    let (kind, number) = parse(backend).ok()?;
    matches!(kind, Backend::LibTorchCuda | Backend::Cuda).then(|| ask("memory.total", number))?
}

/// Memory in use on GPU `number`, in bytes, by all processes. Numbers count the GPUs that CUDA_VISIBLE_DEVICES leaves
/// visible. `None` if `nvidia-smi` fails.
pub fn used(number: usize) -> Option<u64> {
    ask("memory.used", number)
}

fn ask(what: &str, number: usize) -> Option<u64> {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
    let name = match visible.is_empty() {
        true => number.to_string(),
        false => visible.split(',').nth(number)?.trim().to_string(),
    };
    let arguments = [&format!("--query-gpu={what}"), "--format=csv,noheader,nounits", "--id", &name];
    let output = Command::new("nvidia-smi").args(arguments).output().ok()?;
    let mebibytes: u64 = String::from_utf8(output.stdout).ok()?.trim().parse().ok()?;
    Some(mebibytes << 20)
}

/// Peak resident memory of this process in bytes, mapped files included (`VmHWM` of `/proc/self/status`). `None` on
/// systems without this counter.
pub fn host_peak() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::host_peak;

    #[test]
    fn the_peak_never_falls() {
        let Some(before) = host_peak() else { return };
        let held = vec![1u8; 64 << 20];
        let after = host_peak();
        assert!(held.iter().all(|byte| *byte == 1) && after.is_some_and(|after| after >= before));
        drop(held);
        assert!(host_peak() >= after);
    }
}
