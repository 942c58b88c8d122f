//! Prints what `roll check` finds, section by section.

use roll_core::{Error, Result};
use roll_train::Finding;
use roll_train::progress::counted;

/// Width of the names of sections.
const NAME_WIDTH: usize = 10;

/// Prints findings in the order of their sections, and remembers whether the run would fail.
#[derive(Debug, Default)]
pub struct Findings {
    /// The section whose name the next line shows; empty once a line has shown it.
    section: &'static str,
    problems: u64,
    /// Findings of the opening of the run that are not printed yet, each with its section.
    queued: Vec<(&'static str, Finding)>,
}

impl Findings {
    /// Takes the findings of the opening of a run. [`Findings::print_queued`] prints them when their section comes.
    pub fn new(queued: Vec<(&'static str, Finding)>) -> Self {
        Self { queued, ..Self::default() }
    }

    /// Prints the queued findings of this section.
    pub fn print_queued(&mut self, section: &str) {
        let queued = std::mem::take(&mut self.queued).into_iter();
        let (of_section, of_others): (Vec<_>, Vec<_>) = queued.partition(|(its_section, _)| *its_section == section);
        self.queued = of_others;
        for (_, finding) in of_section {
            match finding {
                Finding::Good(text) => self.good(text),
                Finding::Note(text) => self.note(text),
                Finding::Problem(text) => self.problem(text),
            }
        }
    }

    /// Adds findings that are printed before those of the opening.
    pub fn prepend(&mut self, found: Vec<(&'static str, Finding)>) {
        self.queued.splice(..0, found);
    }

    pub fn has_problems(&self) -> bool {
        self.problems > 0
    }

    /// Begins a section: the next line shows its name.
    pub fn section(&mut self, name: &'static str) {
        self.section = name;
    }

    /// Something is as it should be.
    pub fn good(&mut self, text: impl AsRef<str>) {
        self.print("", text.as_ref());
    }

    /// Something that does not stop the run.
    pub fn note(&mut self, text: impl AsRef<str>) {
        self.print("note: ", text.as_ref());
    }

    /// Something that would stop the run.
    pub fn problem(&mut self, text: impl AsRef<str>) {
        self.problems += 1;
        self.print("PROBLEM: ", text.as_ref());
    }

    fn print(&mut self, mark: &str, text: &str) {
        for (i, line) in text.lines().enumerate() {
            let indent = if i == 0 { mark.to_string() } else { " ".repeat(mark.len()) };
            println_wrapped!("{:<NAME_WIDTH$} {indent}{line}", self.section);
            self.section = "";
        }
    }

    /// Prints that there was no problem, or fails with the number of problems.
    pub fn end(self) -> Result<()> {
        match self.problems {
            0 => {
                println_wrapped!("no problem found");
                Ok(())
            }
            n => Err(Error::failed("the run would fail")(format!("{} above", counted(n, "problem")))),
        }
    }
}
