//! Devices of wgpu: Vulkan, Metal or Direct3D 12.

use std::collections::BTreeMap;
use std::sync::Mutex;

use burn_tensor::{Device, DeviceKind};

use crate::sync::lock;

/// Opens device `number`: 0 is the fastest device found (or the one that `CUBECL_WGPU_DEFAULT_DEVICE` names), N is the
/// N-th further discrete GPU. The device is started at the first call; later calls return the same device or the same
/// error.
pub fn open(number: usize) -> Result<Device, String> {
    static OPENED: Mutex<BTreeMap<usize, Result<Device, String>>> = Mutex::new(BTreeMap::new());
    lock(&OPENED).entry(number).or_insert_with(|| start(number)).clone()
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
