//! What commands print and write: lines on standard output, whose reader may go away before the end (`roll config |
//! head`), wrapped to the width of a terminal; and files that may exist already.

use std::borrow::Cow;
use std::fmt::Arguments;
use std::io::{ErrorKind, IsTerminal, Write};
use std::path::Path;

use roll_core::{Error, Result};
use roll_train::config::without_secrets;

/// Prints a line by [`print_line`]. The standard macro of this name panics if the reader has closed the pipe.
macro_rules! println {
    () => {
        $crate::output::print_line(format_args!(""))
    };
    ($($text:tt)*) => {
        $crate::output::print_line(format_args!($($text)*))
    };
}

/// Whether a character controls a terminal instead of being shown, or changes the direction of text.
pub fn controls_terminal(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// The text with characters that control a terminal escaped, such as `\u001b`, because names in files, paths and
/// messages may come from other people. Line ends and tabs stay. JSON keeps its meaning.
pub fn printable(text: &str) -> Cow<'_, str> {
    let controls = |c: char| controls_terminal(c) && c != '\n' && c != '\t';
    if !text.contains(controls) {
        return text.into();
    }
    let escaped = |c: char| if controls(c) { format!("\\u{:04x}", u32::from(c)) } else { c.into() };
    text.chars().map(escaped).collect()
}

/// Prints a line, made [`printable`] and without secrets. If the reader went away, nothing happens. Another failure,
/// such as a full disk behind a redirection, ends the process. That loses no work, because commands print after it.
pub fn print_line(text: Arguments<'_>) {
    if let Err(error) = writeln!(std::io::stdout(), "{}", printable(&without_secrets(&text.to_string())))
        && error.kind() != ErrorKind::BrokenPipe
    {
        eprintln!("error: cannot write to the standard output: {error}");
        std::process::exit(1);
    }
}

/// Prints a line for people. In a terminal, a line that is too long is wrapped, and continues below its last column.
pub fn print_wrapped(text: Arguments<'_>) {
    let text = printable(&without_secrets(&text.to_string())).into_owned();
    let columns = console::Term::stdout().size_checked().filter(|_| std::io::stdout().is_terminal());
    match columns.map(|(_, columns)| usize::from(columns)) {
        Some(columns @ 1..) => print_line(format_args!("{}", wrapped(&text, columns, continuation_indent))),
        _ => print_line(format_args!("{text}")),
    }
}

/// Prints a line by [`print_wrapped`].
macro_rules! println_wrapped {
    ($($text:tt)*) => {
        $crate::output::print_wrapped(format_args!($($text)*))
    };
}

/// The indentation of the lines on which a row of a table continues: the start of its last column, which lies behind
/// two spaces or more. A column that begins far to the right would leave no room for wrapped words, so the indentation
/// is then 4. It is at least 2.
fn continuation_indent(row: &str) -> usize {
    /// Three quarters of a terminal of 80 columns.
    const FAR_RIGHT: usize = 60;
    let start = row.rfind("  ").map_or(0, |at| row[..at + 2].chars().count());
    if start > FAR_RIGHT { 4 } else { start.max(2) }
}

/// Wraps lines that are longer than `columns` between words. `indent` returns the indentation of the lines on which a
/// line continues.
///
/// Lines are wrapped at double spaces if possible, so that `lr 2.3e-3` stays together. A word that is too long is not
/// broken. Escape sequences take no column.
pub fn wrapped(text: &str, columns: usize, indent: fn(&str) -> usize) -> String {
    let mut wrapped = String::with_capacity(text.len());
    for (i, line) in text.split('\n').enumerate() {
        if i > 0 {
            wrapped.push('\n');
        }
        let indentation = indent(line);
        let mut column = 0;
        let words = words(line);
        for (at, word) in words.iter().enumerate() {
            let width = console::measure_text_width(word);
            let width_without_spaces = console::measure_text_width(word.trim_start());
            // The words from one double space to the next are a group.
            let begins_group = word.starts_with("  ") && !words[at + 1..].is_empty();
            let width_of_group = if begins_group { group_width(&words[at..]) } else { width };
            // A group stays together if a line has room for it.
            let width_to_fit = if indentation + width_of_group <= columns { width_of_group } else { width };
            let is_first = column <= indentation;
            if !is_first && column + width_to_fit > columns && indentation + width_without_spaces <= columns {
                wrapped.push('\n');
                wrapped.extend(std::iter::repeat_n(' ', indentation));
                wrapped.push_str(word.trim_start());
                column = indentation + width_without_spaces;
            } else {
                wrapped.push_str(word);
                column += width;
            }
        }
    }
    wrapped
}

/// Columns of the group that begins with the first word and ends before the next double space.
fn group_width(words: &[String]) -> usize {
    let others = words[1..].iter().take_while(|word| !word.starts_with("  "));
    words[..1].iter().chain(others).map(|word| console::measure_text_width(word)).sum()
}

/// Words, each with the spaces before it.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    for next in line.chars() {
        match words.last_mut() {
            // Only a space after a letter begins another word.
            Some(word) if next != ' ' || word.is_empty() || word.ends_with(' ') => word.push(next),
            _ => words.push(next.into()),
        }
    }
    words
}

/// Fails if `path` is an existing file, or a directory that is not empty. `force` is the argument `--force`, which
/// allows to replace it.
pub fn refuse_existing(path: &Path, force: bool) -> Result<()> {
    let has_entries = || std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_some());
    match !force && (path.is_file() || has_entries()) {
        true => Err(Error::bad_file(path, "exists already; --force replaces it")),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        let hostile = "a\u{1b}]0;PWN\u{7}\r\u{9b}2J\u{7f}\0\u{202e}txt.exe\u{2066}\u{2069}";
        assert_eq!(
            printable(hostile),
            "a\\u001b]0;PWN\\u0007\\u000d\\u009b2J\\u007f\\u0000\\u202etxt.exe\\u2066\\u2069"
        );
        let plain = "two\tcolumns\nand \u{6587}\u{5b57}, \u{05d0}\u{200f}";
        assert!(matches!(printable(plain), Cow::Borrowed(text) if text == plain));
    }

    #[test]
    fn wraps_long_lines_between_words() {
        let line = "\u{1b}[32m INFO\u{1b}[0m step 2/4  score 0.8654  kl 0  lr 6.0e-4\n";
        let six = |columns| wrapped(line, columns, |_| 6);
        assert_eq!(six(30), "\u{1b}[32m INFO\u{1b}[0m step 2/4  score 0.8654\n      kl 0  lr 6.0e-4\n");
        assert_eq!(six(80), line);
        // Not between a name and its value.
        assert_eq!(six(32), six(30));
        assert_eq!(six(42), "\u{1b}[32m INFO\u{1b}[0m step 2/4  score 0.8654  kl 0\n      lr 6.0e-4\n");
        let path = " INFO wrote /a/long/path/that/fits/nowhere\n";
        assert_eq!(wrapped(path, 20, |_| 6), path);
        assert_eq!(wrapped("", 10, |_| 6), "");
    }

    #[test]
    fn wraps_rows_of_tables_in_their_last_column() {
        let row = "reward       motion         How much changes from frame to frame";
        let there = " ".repeat(28);
        assert_eq!(
            wrapped(row, 50, continuation_indent),
            format!("reward       motion         How much changes from\n{there}frame to frame")
        );
        assert_eq!(continuation_indent("no columns at all"), 2);
    }

    #[test]
    fn existing_files_are_replaced_only_with_force() -> Result<()> {
        let dir = tempfile::tempdir().map_err(Error::failed("a directory"))?;
        let (file, new) = (dir.path().join("a.mp4"), dir.path().join("b.mp4"));
        refuse_existing(dir.path(), false)?;
        std::fs::write(&file, "x").map_err(Error::file("write", &file))?;
        refuse_existing(&new, false)?;
        refuse_existing(&file, true)?;
        for path in [file.as_path(), dir.path()] {
            let message = refuse_existing(path, false).map_or_else(|e| e.to_string(), |()| String::new());
            assert!(message.contains("--force"), "{message}");
        }
        Ok(())
    }
}
