//! GPUs by name. XLA's CUDA plugin has no names for GPU models; it needs their properties.

use crate::ffi::Setting;

/// An H100 SXM: NVIDIA's figures, in the text form of XLA's `GpuTargetConfigProto`.
const H100: &str = r#"
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 8 }
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  l2_cache_size: 52428800 memory_bandwidth: 3352320000000 device_memory_size: 84942979072
}
"#;

/// The topology options for a name such as `h100:1x1x8` (partitions x hosts per partition x devices per host); `None`
/// for other names.
pub(crate) fn options(name: &str) -> Option<Vec<(String, Setting)>> {
    let shape = name.strip_prefix("h100:")?;
    let text = |key: &str, text: &str| (key.to_owned(), Setting::Text(text.to_owned()));
    Some(vec![text("target_config", H100), text("topology", shape)])
}
