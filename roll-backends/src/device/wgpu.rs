//! A device that Vulkan, Metal or Direct3D 12 drives.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use burn::tensor::{Device, DeviceKind};

/// Device `number`: 0 is the fastest that is found (or what `CUBECL_WGPU_DEFAULT_DEVICE` names), N the N-th discrete
/// GPU after the first. Started at the first call; a failure is remembered, and tells the search.
pub fn open(number: usize) -> Result<Device, String> {
    static OPENED: Mutex<BTreeMap<usize, Result<Device, String>>> = Mutex::new(BTreeMap::new());
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    opened.entry(number).or_insert_with(|| start(number)).clone()
}

fn start(number: usize) -> Result<Device, String> {
    #[cfg(feature = "kernel-cache")]
    super::cube::set_up(|_| ());
    let kind = if number == 0 { DeviceKind::DefaultDevice } else { DeviceKind::DiscreteGpu(number) };
    Device::wgpu_options().device_kind(kind).init().map_err(|error| {
        format!(
            "{error} (it needs a driver of Vulkan, Metal or Direct3D 12: `vulkaninfo --summary` lists the devices; Mesa's \
             `mesa-vulkan-drivers` has one for the CPU)"
        )
    })
}
