//! Clients and buffers, with their lifetimes.

use std::path::Path;
use std::sync::Arc;

use super::api::{self, Arguments, Plugin, Word, text};
use super::description::DeviceKind;
use super::executable::Executable;
use super::options::{CompileOptions, Setting, Settings};
use crate::error::XlaError;
use crate::hlo::{Element, Shape};
use crate::store::Store;

/// The devices of a plugin that this process can use.
pub(crate) struct Client {
    pub(super) plugin: Arc<Plugin>,
    pub(super) handle: Word,
    devices: Vec<Word>,
    /// The kind of the first device.
    kind: DeviceKind,
    /// The store that the plugin may call while the client lives.
    _store: Option<Arc<Store>>,
}

impl Client {
    /// Creates a client of a plugin, with options of the plugin's own.
    ///
    /// # Errors
    /// Any error of the plugin.
    pub(crate) fn new(plugin: Arc<Plugin>, options: Vec<(String, Setting)>) -> Result<Self, XlaError> {
        Self::create(plugin, options, None)
    }

    /// Creates the client of one of several processes, which are connected by a store.
    ///
    /// # Errors
    /// Any error of the plugin.
    pub(crate) fn among(
        plugin: Arc<Plugin>,
        options: Vec<(String, Setting)>,
        store: Store,
    ) -> Result<Self, XlaError> {
        Self::create(plugin, options, Some(Arc::new(store)))
    }

    fn create(
        plugin: Arc<Plugin>,
        options: Vec<(String, Setting)>,
        store: Option<Arc<Store>>,
    ) -> Result<Self, XlaError> {
        let handle = plugin.create_client(&Settings::new(options), store.as_deref())?;
        let kind = DeviceKind::default();
        let mut client = Self { plugin, handle, devices: Vec::new(), kind, _store: store };
        let found = client.plugin.call(api::ADDRESSABLE_DEVICES, Arguments::new().set(2, handle))?;
        if found.get(4) > 0 {
            // SAFETY: the client has this many devices, and the list lives as long as the client.
            let devices = unsafe { std::slice::from_raw_parts(found.get(3) as *const Word, found.get(4)) };
            client.devices = devices.to_vec();
            client.kind = DeviceKind::of(&client.plugin, description(&client.plugin, devices[0])?)?;
        }
        Ok(client)
    }

    /// The plugin's library.
    pub(crate) fn path(&self) -> &Path {
        self.plugin.path()
    }

    /// Major and minor version of the plugin's API.
    pub(crate) fn api_version(&self) -> (i32, i32) {
        self.plugin.version()
    }

    /// The newest StableHLO version that the plugin supports; `None` if it does not report one.
    pub(crate) fn stablehlo(&self) -> Option<[u64; 3]> {
        self.plugin.stablehlo()
    }

    /// Number of devices.
    pub(crate) fn devices(&self) -> usize {
        self.devices.len()
    }

    /// The device IDs, unique across processes.
    ///
    /// # Errors
    /// Any error of the plugin.
    pub(crate) fn ids(&self) -> Result<Vec<u64>, XlaError> {
        ids(&self.plugin, &self.devices)
    }

    /// The platform's name and version.
    ///
    /// # Errors
    /// Any error of the plugin.
    pub(crate) fn platform(&self) -> Result<[String; 2], XlaError> {
        let query = |function| -> Result<String, XlaError> {
            let result = self.plugin.call(function, Arguments::new().set(2, self.handle))?;
            // SAFETY: the text lives as long as the client.
            Ok(unsafe { text(result.get(3), result.get(4)) })
        };
        Ok([query(api::PLATFORM_NAME)?, query(api::PLATFORM_VERSION)?])
    }

    /// Compiles a program from StableHLO text.
    ///
    /// # Errors
    /// [`XlaError::Compile`], [`XlaError::Memory`].
    pub(crate) fn compile(
        self: &Arc<Self>,
        program: &str,
        options: &CompileOptions,
    ) -> Result<Executable, XlaError> {
        let (options, flags) = (options.to_proto(), &options.flags);
        let program = program_of(program);
        let arguments = Arguments::new()
            .set(2, self.handle)
            .pointer(3, program.as_ptr())
            .pointer(4, options.as_ptr())
            .set(5, options.len());
        let compiled = self.plugin.call(api::COMPILE, arguments);
        Executable::new(
            self,
            compiled.map_err(|error| self.plugin.classify_compile_error(&self.kind, flags, error))?.get(6),
        )
    }

    /// Loads a program that [`Compiled::serialize`](super::executable::Compiled::serialize) of the same plugin has
    /// serialized.
    ///
    /// # Errors
    /// Any error of the plugin.
    pub(crate) fn load(self: &Arc<Self>, serialized: &[u8]) -> Result<Executable, XlaError> {
        let arguments =
            Arguments::new().set(2, self.handle).pointer(3, serialized.as_ptr()).set(4, serialized.len());
        Executable::new(self, self.plugin.call(api::LOAD, arguments)?.get(5))
    }

    /// The kind of the devices.
    pub(crate) fn kind(&self) -> &DeviceKind {
        &self.kind
    }

    /// Copies bytes from the host to a device, as a tensor; returns when the copy is complete.
    ///
    /// # Errors
    /// Any error of the plugin; the device may be out of memory.
    ///
    /// # Panics
    /// If the number of bytes is not that of the shape.
    pub(crate) fn upload(
        self: &Arc<Self>,
        device: usize,
        shape: &Shape,
        bytes: &[u8],
    ) -> Result<DeviceBuffer, XlaError> {
        assert_eq!(bytes.len(), shape.byte_len(), "the bytes of {shape}");
        let dims: Vec<i64> = shape.dims.iter().map(|&dim| dim as i64).collect();
        // 1: the bytes must not change until the transfer has completed, which is awaited below.
        let arguments = Arguments::new()
            .set(2, self.handle)
            .pointer(3, bytes.as_ptr())
            .set(4, kind(shape.element))
            .pointer(5, dims.as_ptr())
            .set(6, dims.len())
            .set(9, 1)
            .set(10, self.devices[device]);
        let done = self.plugin.call(api::UPLOAD, arguments)?;
        let buffer = DeviceBuffer { client: Arc::clone(self), handle: done.get(14) };
        self.plugin.wait(done.get(13))?;
        Ok(buffer)
    }
}

/// Returns a device's `PJRT_DeviceDescription`, which lives as long as the client.
fn description(plugin: &Plugin, device: Word) -> Result<Word, XlaError> {
    Ok(plugin.call(api::GET_DESCRIPTION, Arguments::new().set(2, device))?.get(3))
}

/// Returns the IDs of devices.
pub(super) fn ids(plugin: &Plugin, devices: &[Word]) -> Result<Vec<u64>, XlaError> {
    let id = |device: &Word| {
        let description = description(plugin, *device)?;
        Ok(plugin.call(api::DESCRIPTION_ID, Arguments::new().set(2, description))?.get(3) as u64)
    };
    devices.iter().map(id).collect()
}

/// Builds a `PJRT_Program` from StableHLO text.
pub(super) fn program_of(text: &str) -> [Word; 6] {
    let format = "mlir";
    [48, 0, text.as_ptr() as Word, text.len(), format.as_ptr() as Word, format.len()]
}

impl Drop for Client {
    fn drop(&mut self) {
        // An error here cannot be reported.
        let _ = self.plugin.call(api::CLIENT_DESTROY, Arguments::new().set(2, self.handle));
    }
}

/// Returns the `PJRT_Buffer_Type`.
fn kind(element: Element) -> Word {
    match element {
        Element::Bool => 1,
        Element::I32 => 4,
        Element::I64 => 5,
        Element::U8 => 6,
        Element::U32 => 8,
        Element::U64 => 9,
        Element::F16 => 10,
        Element::F32 => 11,
        Element::F64 => 12,
        Element::Bf16 => 13,
    }
}

/// A tensor on a device. A program may have taken its storage as a donated buffer; it must not be read afterwards.
pub(crate) struct DeviceBuffer {
    pub(super) client: Arc<Client>,
    pub(super) handle: Word,
}

impl DeviceBuffer {
    /// Waits until the elements are computed and copies them to the host.
    ///
    /// # Errors
    /// Any error of the plugin, including one of the program that computes the elements.
    pub(crate) fn download(&self, bytes: &mut [u8]) -> Result<(), XlaError> {
        let plugin = &self.client.plugin;
        let arguments =
            Arguments::new().set(2, self.handle).pointer(4, bytes.as_mut_ptr()).set(5, bytes.len());
        let done = plugin.call(api::DOWNLOAD, arguments)?;
        plugin.wait(done.get(6))
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        // An error here cannot be reported.
        let _ = self.client.plugin.call(api::BUFFER_DESTROY, Arguments::new().set(2, self.handle));
    }
}
