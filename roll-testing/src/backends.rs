//! The backends that tests run on.

/// Whether tests run on `backend`: on all backends, or on those in the comma-separated list `ROLL_TEST_BACKENDS`. A
/// test that does not run on any listed backend must fail, because it would test nothing.
pub fn is_tested(backend: &str) -> bool {
    std::env::var("ROLL_TEST_BACKENDS").ok().is_none_or(|list| lists(&list, backend))
}

fn lists(list: &str, backend: &str) -> bool {
    list.split(',').any(|name| name.trim() == backend)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_tested_compares_whole_names() {
        assert!(lists("libtorch-cuda, cuda", "cuda") && lists("libtorch-cuda, cuda", "libtorch-cuda"));
        assert!(!lists("libtorch-cuda", "cuda") && !lists("libtorch-cuda", "libtorch") && !lists("", "flex"));
    }
}
