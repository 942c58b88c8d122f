//! ONNX Runtime, for passes without gradient. Its library is loaded at run time from ORT_DYLIB_PATH.
//!
//! Without the cargo feature `onnxruntime`, all functions fail with [`OnnxError::NoRuntime`].

use std::path::Path;

use roll_core::{Result, Tensor};

use super::error::OnnxError;

/// The environment variable with the path of ONNX Runtime's library.
pub const LIBRARY_VARIABLE: &str = "ORT_DYLIB_PATH";

pub use imp::{Session, runtime_version};

#[cfg(not(feature = "onnxruntime"))]
mod imp {
    use super::*;

    /// No session exists in a build without ONNX Runtime.
    #[derive(Debug)]
    pub struct Session(std::convert::Infallible);

    impl Session {
        /// Fails with [`OnnxError::NoRuntime`].
        pub fn open(_: &Path) -> Result<Self, OnnxError> {
            Err(OnnxError::NoRuntime)
        }

        /// Fails with [`OnnxError::NoRuntime`].
        pub fn parse(_: &Path, _: &[u8]) -> Result<Self, OnnxError> {
            Err(OnnxError::NoRuntime)
        }

        /// Is never called.
        pub fn run(&self, _: &[Tensor]) -> Result<Vec<Tensor>> {
            match self.0 {}
        }
    }

    /// Fails with [`OnnxError::NoRuntime`].
    pub fn runtime_version() -> Result<&'static str, OnnxError> {
        Err(OnnxError::NoRuntime)
    }
}

#[cfg(feature = "onnxruntime")]
mod imp {
    use std::path::PathBuf;
    use std::sync::{Mutex, OnceLock, PoisonError};

    use ort::environment::Environment;
    use ort::session::builder::SessionBuilder;
    use ort::session::{Session as Ort, SessionInputValue};
    use ort::value::{DynValue, Tensor as OrtTensor, TensorElementType};
    use roll_core::DType;

    use super::super::error::{Problem, no_panic};
    use super::*;

    /// The library, loaded once and never unloaded. A later change of the environment variable has no effect.
    fn library() -> Result<&'static Library, OnnxError> {
        static LOADED: OnceLock<Result<Library, String>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| no_panic(load).map_err(|p| p.0));
        loaded.as_ref().map_err(|problem| OnnxError::Library { problem: problem.clone() })
    }

    /// The loaded library.
    struct Library {
        environment: Environment,
        /// Branch, commit and options of its build.
        build: &'static str,
    }

    /// Loads the library that the environment variable names.
    fn load() -> Result<Library, Problem> {
        let path = std::env::var_os(LIBRARY_VARIABLE).filter(|p| !p.is_empty()).map(PathBuf::from);
        let path = path.ok_or_else(|| Problem(format!("{LIBRARY_VARIABLE} is not set")))?;
        // A relative path would first be searched next to the program.
        let path =
            path.canonicalize().map_err(|e| Problem(format!("{LIBRARY_VARIABLE} is {}: {e}", path.display())))?;
        if !path.is_file() {
            return Err(Problem(format!("{LIBRARY_VARIABLE} is {}, which is not a file", path.display())));
        }
        let builder =
            ort::init_from(&path).map_err(|e| Problem(format!("{LIBRARY_VARIABLE} is {}: {e}", path.display())))?;
        let environment = builder.with_name("roll").with_telemetry(false).build().map_err(problem)?;
        environment.set_log_level(ort::logging::LogLevel::Warning);
        // The crate does not expose the library's version number.
        let build = ort::info();
        tracing::info!(path = %path.display(), %build, "loaded ONNX Runtime");
        Ok(Library { environment, build })
    }

    /// Identifies the loaded ONNX Runtime by branch, commit and options of its build. Fails like [`Session::open`].
    pub fn runtime_version() -> Result<&'static str, OnnxError> {
        Ok(library()?.build)
    }

    /// Converts an error of ONNX Runtime.
    fn problem<R>(error: ort::Error<R>) -> Problem {
        Problem(error.to_string())
    }

    /// A graph loaded by ONNX Runtime, on the CPU, with the same number of threads as this project's own executor.
    #[derive(Debug)]
    pub struct Session {
        path: PathBuf,
        /// A run needs exclusive access to the session.
        session: Mutex<Ort>,
    }

    impl Session {
        /// Loads the file. Fails with [`OnnxError::Library`] if the library cannot be loaded, and with
        /// [`OnnxError::Runtime`] if it refuses the file.
        pub fn open(path: &Path) -> Result<Self, OnnxError> {
            let bytes = std::fs::read(path).map_err(|source| OnnxError::File { path: path.to_owned(), source })?;
            Self::parse(path, &bytes)
        }

        /// Opens a session like [`Session::open`], from the file's bytes. Error messages call the file `path`.
        pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, OnnxError> {
            let environment = &library()?.environment;
            let session = no_panic(|| builder(environment)?.commit_from_memory(bytes).map_err(problem));
            let path = path.to_owned();
            match session {
                Ok(session) => Ok(Self { path, session: Mutex::new(session) }),
                Err(Problem(problem)) => Err(OnnxError::Runtime { path, problem }),
            }
        }

        /// Computes every output, as f32 or i64, for one tensor per input, in the order and with the types of the file.
        pub fn run(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
            let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
            let outputs = no_panic(|| {
                if inputs.len() != session.inputs().len() {
                    return Err(
                        format!("it has {} inputs, found {} tensors", session.inputs().len(), inputs.len()).into()
                    );
                }
                let inputs: Vec<SessionInputValue> = inputs.iter().map(to_ort).collect::<Result<_, _>>()?;
                let outputs = session.run(inputs.as_slice()).map_err(problem)?;
                outputs.values().map(|value| from_ort(&value)).collect()
            });
            let failed = |p: Problem| OnnxError::Runtime { path: self.path.clone(), problem: p.0 };
            Ok(outputs.map_err(failed)?)
        }
    }

    fn builder(environment: &Environment) -> Result<SessionBuilder, Problem> {
        let builder = Ort::builder(environment).map_err(problem)?;
        let builder = builder.with_intra_threads(rayon::current_num_threads()).map_err(problem)?;
        builder.with_deterministic_compute(true).map_err(problem)
    }

    fn to_ort(tensor: &Tensor) -> Result<SessionInputValue<'static>, Problem> {
        let shape = tensor.shape();
        let value: DynValue = match tensor.dtype() {
            DType::I64 => {
                OrtTensor::from_array((shape, tensor.as_slice::<i64>()?.to_vec())).map_err(problem)?.into_dyn()
            }
            DType::I32 => {
                OrtTensor::from_array((shape, tensor.as_slice::<i32>()?.to_vec())).map_err(problem)?.into_dyn()
            }
            DType::U8 => OrtTensor::from_array((shape, tensor.as_bytes().to_vec())).map_err(problem)?.into_dyn(),
            DType::Bool => {
                let values: Vec<bool> = tensor.as_bytes().iter().map(|v| *v != 0).collect();
                OrtTensor::from_array((shape, values)).map_err(problem)?.into_dyn()
            }
            DType::F32 | DType::Bf16 | DType::F16 => {
                OrtTensor::from_array((shape, tensor.to_f32_vec())).map_err(problem)?.into_dyn()
            }
        };
        Ok(value.into())
    }

    fn from_ort(value: &DynValue) -> Result<Tensor, Problem> {
        fn tensor<T: roll_core::Element>(shape: &[i64], values: Vec<T>) -> Result<Tensor, Problem> {
            let shape: Vec<usize> = shape.iter().map(|&d| d.max(0) as usize).collect();
            Ok(Tensor::new(values, shape)?)
        }
        macro_rules! integers {
            ($type:ty) => {{
                let (shape, values) = value.try_extract_tensor::<$type>().map_err(problem)?;
                tensor(shape, values.iter().map(|&v| i64::from(v)).collect())
            }};
        }
        match value.dtype().tensor_type() {
            Some(TensorElementType::Float32) => {
                let (shape, values) = value.try_extract_tensor::<f32>().map_err(problem)?;
                tensor(shape, values.to_vec())
            }
            Some(TensorElementType::Float64) => {
                let (shape, values) = value.try_extract_tensor::<f64>().map_err(problem)?;
                tensor(shape, values.iter().map(|&v| v as f32).collect())
            }
            Some(TensorElementType::Int64) => integers!(i64),
            Some(TensorElementType::Int32) => integers!(i32),
            Some(TensorElementType::Uint8) => integers!(u8),
            Some(TensorElementType::Bool) => integers!(bool),
            _ => Err(format!(
                "an output is {:?}; tensors of float, double, int64, int32, uint8 and bool are read",
                value.dtype()
            )
            .into()),
        }
    }
}
