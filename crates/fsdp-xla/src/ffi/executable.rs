//! Compiled programs, loaded on devices or not.

use std::ffi::c_void;
use std::sync::Arc;

use super::api::{self, Arguments, Plugin, Word, attributes, text};
use super::client::{Client, DeviceBuffer, ids};
use crate::error::XlaError;

/// A compiled program.
pub(crate) struct Compiled {
    pub(super) plugin: Arc<Plugin>,
    pub(super) handle: Word,
}

impl Compiled {
    /// Number of results.
    fn outputs(&self) -> Result<usize, XlaError> {
        Ok(self.plugin.call(api::NUM_OUTPUTS, Arguments::new().set(2, self.handle))?.get(3))
    }

    /// Serializes the program, for [`Client::load`].
    ///
    /// # Errors
    /// Any error of the plugin; it may not support serialization.
    pub(crate) fn serialize(&self) -> Result<Vec<u8>, XlaError> {
        let serialized = self.plugin.call(api::SERIALIZE, Arguments::new().set(2, self.handle))?;
        let bytes = match serialized.get(4) {
            0 => Vec::new(),
            // SAFETY: the plugin returned this many bytes, valid until the deleter below runs.
            len => unsafe { std::slice::from_raw_parts(serialized.get(3) as *const u8, len) }.to_vec(),
        };
        // SAFETY: the header declares `void (*)(PJRT_SerializedExecutable*)`, or null.
        let free: Option<unsafe extern "C" fn(*mut c_void)> =
            unsafe { std::mem::transmute(serialized.get(6)) };
        if let Some(free) = free {
            // SAFETY: the deleter belongs to the bytes returned above, which are not read any more.
            unsafe { free(serialized.get(5) as *mut c_void) };
        }
        Ok(bytes)
    }

    /// The optimized program in the compiler's own format, and the format's name; `None` if the plugin does not expose
    /// it.
    ///
    /// # Errors
    /// Any error of the plugin.
    pub(crate) fn optimized(&self) -> Result<Option<(String, Vec<u8>)>, XlaError> {
        // A `PJRT_Program`: the first call has no buffer and returns the required size.
        let mut program: [Word; 6] = [48, 0, 0, 0, 0, 0];
        let fetch = |program: &mut [Word; 6]| {
            let arguments = Arguments::new().set(2, self.handle).set(3, program.as_mut_ptr() as Word);
            self.plugin.call(api::OPTIMIZED_PROGRAM, arguments).map(drop)
        };
        match fetch(&mut program) {
            Err(error) if error.is_unimplemented() => return Ok(None),
            result => result?,
        }
        let mut bytes = vec![0_u8; program[3]];
        program[2] = bytes.as_mut_ptr() as Word;
        fetch(&mut program)?;
        // SAFETY: the format's name is a constant of the plugin.
        let format = unsafe { text(program[4], program[5]) };
        Ok(Some((format, bytes)))
    }

    /// The memory needed on each device; `None` if the plugin does not report it.
    ///
    /// # Errors
    /// Any error of the plugin.
    pub(crate) fn memory(&self) -> Result<Option<MemoryNeed>, XlaError> {
        let stats = match self.plugin.call(api::MEMORY_STATS, Arguments::new().set(2, self.handle)) {
            Err(error) if error.is_unimplemented() => return Ok(None),
            stats => stats?,
        };
        let bytes = |field| stats.get(field) as u64;
        let [code, arguments, results, aliased, temporaries] = [3, 4, 5, 6, 7].map(bytes);
        let peak = Some(bytes(13)).filter(|&peak| peak > 0);
        Ok(Some(MemoryNeed { code, arguments, results, aliased, temporaries, peak }))
    }

    /// Floating-point operations per device, as counted by the compiler; `None` if the plugin does not report them.
    ///
    /// # Errors
    /// Any error of the plugin.
    pub(crate) fn flops(&self) -> Result<Option<f64>, XlaError> {
        let costs = match self.plugin.call(api::COST_ANALYSIS, Arguments::new().set(2, self.handle)) {
            Err(error) if error.is_unimplemented() => return Ok(None),
            costs => costs?,
        };
        // SAFETY: the list has this many properties, which live as long as the executable.
        let found = unsafe { attributes(costs.get(4), costs.get(3)) };
        let flops = found.into_iter().find(|(name, _)| name == "flops");
        // The value is a single-precision float.
        Ok(flops.map(|(_, bits)| f64::from(f32::from_bits(bits as u32))))
    }
}

/// Memory that a program needs on each device, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryNeed {
    /// The program itself.
    pub code: u64,
    /// Arguments: parameters, optimizer state, data.
    pub arguments: u64,
    /// Results.
    pub results: u64,
    /// Results that reuse the storage of donated arguments.
    pub aliased: u64,
    /// Temporary buffers.
    pub temporaries: u64,
    /// Peak bytes as reported by the compiler; `None` if the plugin does not report it. Compilers for CPUs count only
    /// part of it.
    pub peak: Option<u64>,
}

impl MemoryNeed {
    /// Arguments, results with storage of their own, temporaries and code.
    pub fn total(&self) -> u64 {
        (self.arguments + self.results + self.temporaries + self.code).saturating_sub(self.aliased)
    }
}

impl Drop for Compiled {
    fn drop(&mut self) {
        // An error here cannot be reported.
        let _ = self.plugin.call(api::EXECUTABLE_DESTROY, Arguments::new().set(2, self.handle));
    }
}

/// A program loaded on the devices of a client.
pub(crate) struct Executable {
    client: Arc<Client>,
    handle: Word,
    outputs: usize,
}

impl Executable {
    /// Wraps a program loaded by a client.
    pub(super) fn new(client: &Arc<Client>, handle: Word) -> Result<Self, XlaError> {
        let mut executable = Self { client: Arc::clone(client), handle, outputs: 0 };
        executable.outputs = executable.compiled()?.outputs()?;
        Ok(executable)
    }

    /// The compiled program that was loaded.
    ///
    /// # Errors
    /// Any error of the plugin.
    pub(crate) fn compiled(&self) -> Result<Compiled, XlaError> {
        let plugin = Arc::clone(&self.client.plugin);
        let handle = plugin.call(api::GET_EXECUTABLE, Arguments::new().set(2, self.handle))?.get(3);
        Ok(Compiled { plugin, handle })
    }

    /// The IDs of this process's devices on which the program runs, in the order of their arguments.
    ///
    /// # Errors
    /// Any error of the plugin.
    pub(crate) fn devices(&self) -> Result<Vec<u64>, XlaError> {
        let plugin = &self.client.plugin;
        let found = plugin.call(api::LOADED_DEVICES, Arguments::new().set(2, self.handle))?;
        if found.get(4) == 0 {
            return Ok(Vec::new());
        }
        // SAFETY: the list has this many devices and lives as long as the program.
        ids(plugin, unsafe { std::slice::from_raw_parts(found.get(3) as *const Word, found.get(4)) })
    }

    /// Runs the program on its devices of this process, each with its own arguments; returns the results of each
    /// device. The program may still be running on return.
    ///
    /// # Errors
    /// Any error of the plugin. Later errors are reported when a result is read.
    pub(crate) fn execute(
        &self,
        arguments: &[Vec<Arc<DeviceBuffer>>],
    ) -> Result<Vec<Vec<DeviceBuffer>>, XlaError> {
        let handles: Vec<Vec<Word>> =
            arguments.iter().map(|list| list.iter().map(|buffer| buffer.handle).collect()).collect();
        let argument_lists: Vec<*const Word> = handles.iter().map(Vec::as_ptr).collect();
        let mut results = vec![vec![0; self.outputs]; arguments.len()];
        let result_lists: Vec<*mut Word> = results.iter_mut().map(Vec::as_mut_ptr).collect();
        // `PJRT_ExecuteOptions`: only the size is set.
        let mut options: [Word; 18] = [0; 18];
        options[0] = 144;
        let call = Arguments::new()
            .set(2, self.handle)
            .pointer(3, options.as_ptr())
            .pointer(4, argument_lists.as_ptr())
            .set(5, arguments.len())
            .set(6, handles.first().map_or(0, Vec::len))
            .pointer(7, result_lists.as_ptr());
        self.client.plugin.call(api::EXECUTE, call)?;
        let to_buffer = |handle| DeviceBuffer { client: Arc::clone(&self.client), handle };
        Ok(results.into_iter().map(|list| list.into_iter().map(to_buffer).collect()).collect())
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        // An error here cannot be reported.
        let _ = self.client.plugin.call(api::LOADED_DESTROY, Arguments::new().set(2, self.handle));
    }
}
