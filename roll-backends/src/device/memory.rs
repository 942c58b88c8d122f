//! How much memory a GPU has, and how much of the host's a process takes.

use std::process::Command;

use super::{Backend, parse};

/// Bytes of the memory of the GPU that `backend` names; `None` where it is no NVIDIA GPU, or the driver does not say.
pub fn total(backend: &str) -> Option<u64> {
    let (kind, number) = parse(backend).ok()?;
    matches!(kind, Backend::LibTorchCuda | Backend::Cuda).then(|| ask("memory.total", number))?
}

/// Bytes in use on NVIDIA's GPU `number` of those that this process sees; `None` where the driver does not say.
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

/// The most bytes of host memory that this process had at a time, mapped files included: the kernel's high-water mark. `None`
/// where the system has no such counter.
pub fn host_peak() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::host_peak;

    #[test]
    fn the_peak_includes_memory_that_is_free_again() {
        if host_peak().is_none() {
            roll_testing::skip!("this system has no counter of the memory's peak");
        }
        const HELD: usize = 64 << 20;
        let held = vec![1u8; HELD];
        assert!(held.iter().all(|byte| *byte == 1));
        drop(held);
        // The kernel adds up its counters per processor now and then: the sum lags behind.
        assert!(host_peak().is_some_and(|peak| peak >= HELD as u64 * 3 / 4));
    }
}
