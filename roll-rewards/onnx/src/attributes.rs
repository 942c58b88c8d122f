//! The parts of a node in the file from which its operator is built: attributes and constant inputs.
//!
//! Every attribute is read once. An attribute that the operator does not read is an error.

use std::collections::BTreeMap;

use onnx_rs::ast;

use super::error::Problem;
use super::tensor_proto;
use super::value::{Constant, MAX_HOST_FLOATS};

/// The attributes of a node that have not been read.
pub(super) struct Attributes<'a> {
    unread: BTreeMap<&'a str, &'a ast::Attribute<'a>>,
}

impl<'a> Attributes<'a> {
    /// The attributes of `node`. Fails if an attribute appears twice or refers to an attribute of a function.
    pub fn of(node: &'a ast::Node<'a>) -> Result<Self, Problem> {
        let mut unread = BTreeMap::new();
        for attribute in &node.attribute {
            if !attribute.ref_attr_name.is_empty() {
                return Err(format!(
                    "the attribute `{}` refers to a function's; functions are not run",
                    attribute.name
                )
                .into());
            }
            if unread.insert(attribute.name, attribute).is_some() {
                return Err(format!("the attribute `{}` appears twice", attribute.name).into());
            }
        }
        Ok(Self { unread })
    }

    /// Removes an attribute from the unread ones; `None` if it is missing. Fails if it has another type than `kind`.
    fn take(&mut self, name: &str, kind: ast::AttributeType) -> Result<Option<&'a ast::Attribute<'a>>, Problem> {
        match self.unread.remove(name) {
            // Early exporters left the type out.
            Some(a) if a.r#type != kind && a.r#type != ast::AttributeType::Undefined => {
                Err(format!("the attribute `{name}` should be {kind:?}, found {:?}", a.r#type).into())
            }
            found => Ok(found),
        }
    }

    /// Reads an integer; `None` if the attribute is missing.
    pub fn int(&mut self, name: &str) -> Result<Option<i64>, Problem> {
        Ok(self.take(name, ast::AttributeType::Int)?.map(|a| a.i))
    }

    /// Reads a boolean; false if the attribute is missing.
    pub fn flag(&mut self, name: &str) -> Result<bool, Problem> {
        Ok(self.int(name)?.unwrap_or(0) != 0)
    }

    /// Reads a float; `None` if the attribute is missing.
    pub fn float(&mut self, name: &str) -> Result<Option<f32>, Problem> {
        Ok(self.take(name, ast::AttributeType::Float)?.map(|a| a.f))
    }

    /// Reads a list of floats; `None` if the attribute is missing.
    pub fn floats(&mut self, name: &str) -> Result<Option<Vec<f32>>, Problem> {
        Ok(self.take(name, ast::AttributeType::Floats)?.map(|a| a.floats.clone()))
    }

    /// Reads a list of integers; `None` if the attribute is missing.
    pub fn ints(&mut self, name: &str) -> Result<Option<Vec<i64>>, Problem> {
        Ok(self.take(name, ast::AttributeType::Ints)?.map(|a| a.ints.clone()))
    }

    /// Reads a text; `default` if the attribute is missing.
    pub fn text(&mut self, name: &str, default: &str) -> Result<String, Problem> {
        let found = self.take(name, ast::AttributeType::String)?;
        Ok(found.map_or_else(|| default.to_owned(), |a| String::from_utf8_lossy(a.s).into_owned()))
    }

    /// Reads a tensor; `None` if the attribute is missing.
    pub fn tensor(&mut self, name: &str, device: &burn_tensor::Device) -> Result<Option<Constant>, Problem> {
        match self.take(name, ast::AttributeType::Tensor)? {
            None => Ok(None),
            Some(ast::Attribute { t: Some(t), .. }) => tensor_proto::constant(t, device).map(Some),
            Some(_) => Err(format!("the attribute `{name}` holds no tensor").into()),
        }
    }

    /// Reads a list of sizes, each at least `least`; `default` if the attribute is missing. Fails if the list and
    /// `default` differ in length.
    pub fn sizes(&mut self, name: &str, least: i64, default: &[usize]) -> Result<Vec<usize>, Problem> {
        let Some(ints) = self.ints(name)? else { return Ok(default.to_vec()) };
        if ints.len() != default.len() {
            return Err(format!("`{name}` should have {} numbers, found {ints:?}", default.len()).into());
        }
        sizes(name, &ints, least)
    }

    /// Fails if an attribute was not read.
    pub fn finish(self) -> Result<(), Problem> {
        match self.unread.keys().next() {
            None => Ok(()),
            Some(name) => Err(format!("the attribute `{name}` is not known to this build").into()),
        }
    }
}

/// Converts `ints` to sizes. Fails on sizes below `least`, and above 2^31, so that sums of several sizes cannot
/// overflow.
pub(super) fn sizes(name: &str, ints: &[i64], least: i64) -> Result<Vec<usize>, Problem> {
    let size = |&int: &i64| {
        let is_within_limits = (least..=1 << 31).contains(&int);
        if is_within_limits { usize::try_from(int).ok() } else { None }
    };
    ints.iter()
        .map(size)
        .collect::<Option<_>>()
        .ok_or_else(|| format!("`{name}` should be at least {least} and at most 2^31, found {ints:?}").into())
}

/// An input of a node, as far as it is known when its operator is built.
#[derive(Clone, Copy)]
pub(super) enum SpecInput<'n> {
    /// An optional input that is left out.
    Absent,
    /// A value that is computed when the graph runs.
    Computed,
    Constant(&'n Constant),
}

/// The parts of a node from which its operator is built.
pub(super) struct OperatorSpec<'n, 'a> {
    pub operator: &'a str,
    /// The version of the default operator set.
    pub opset: i64,
    pub attributes: Attributes<'a>,
    pub inputs: Vec<SpecInput<'n>>,
    /// Number of outputs that have a name.
    pub outputs: usize,
    /// Number of outputs up to the last one that is read.
    pub read_outputs: usize,
    /// The device of constants.
    pub device: &'n burn_tensor::Device,
}

impl<'n> OperatorSpec<'n, '_> {
    /// Whether the node has the input `index`.
    pub fn has_input(&self, index: usize) -> bool {
        self.inputs.get(index).is_some_and(|input| !matches!(input, SpecInput::Absent))
    }

    /// The constant at input `index`; `None` if the input is left out. Fails if the input is not constant. `what` is
    /// the input's name in the error.
    pub fn constant(&self, index: usize, what: &str) -> Result<Option<&'n Constant>, Problem> {
        match self.inputs.get(index).copied() {
            None | Some(SpecInput::Absent) => Ok(None),
            Some(SpecInput::Constant(constant)) => Ok(Some(constant)),
            Some(SpecInput::Computed) => Err(format!("`{what}` must be a constant of the file here").into()),
        }
    }

    /// The constant floats at input `index`; see [`OperatorSpec::constant`].
    pub fn constant_floats(&self, index: usize, what: &str) -> Result<Option<&'n [f32]>, Problem> {
        let Some(constant) = self.constant(index, what)? else { return Ok(None) };
        let floats = constant.floats.as_deref();
        floats.map(Some).ok_or_else(|| format!("`{what}` should be at most {MAX_HOST_FLOATS} floats").into())
    }

    /// The constant integers at input `index`; see [`OperatorSpec::constant`].
    pub fn constant_ints(&self, index: usize, what: &str) -> Result<Option<&'n [i64]>, Problem> {
        let Some(constant) = self.constant(index, what)? else { return Ok(None) };
        constant.value.ints().map(Some)
    }

    /// The shape of the constant at input `index`; `None` if the input is not constant.
    pub fn constant_shape(&self, index: usize) -> Option<&'n [usize]> {
        self.constant_if_not_computed(index).map(|constant| constant.value.shape())
    }

    /// The constant at input `index`; `None` if the input is not constant.
    pub fn constant_if_not_computed(&self, index: usize) -> Option<&'n Constant> {
        match self.inputs.get(index).copied() {
            Some(SpecInput::Constant(constant)) => Some(constant),
            _ => None,
        }
    }

    /// A list of integers that is an attribute in older operator sets and the input `index` in newer operator sets;
    /// `None` if it is missing.
    pub fn ints_or_input(&mut self, name: &str, index: usize) -> Result<Option<Vec<i64>>, Problem> {
        match self.attributes.ints(name)? {
            Some(ints) => Ok(Some(ints)),
            None => Ok(self.constant_ints(index, name)?.map(<[i64]>::to_vec)),
        }
    }

    /// Fails unless the node has a number of inputs in `input_counts`, the required ones among them, and only the first
    /// `outputs` of its outputs are read.
    pub fn check_arity(&self, input_counts: std::ops::RangeInclusive<usize>, outputs: usize) -> Result<(), Problem> {
        let count = self.inputs.len();
        if !input_counts.contains(&count)
            || self.inputs[..*input_counts.start()].iter().any(|input| matches!(input, SpecInput::Absent))
        {
            return Err(format!("expected {input_counts:?} inputs, found {count} or a missing one").into());
        }
        let read = self.read_outputs;
        if read > outputs {
            return Err(format!(
                "its output {read} is read; only the first {outputs} of this operator is computed here"
            )
            .into());
        }
        Ok(())
    }
}
