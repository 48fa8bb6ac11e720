package mps

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"
)

// journal writes a log in the format of MPS: time, program, PID, message.
type journal struct {
	out io.Writer
	who string
}

// openJournal opens a file of the log directory for appending, and creates the
// directory if it is missing. If the file can't be written, nothing is logged.
func openJournal(name, who string) (journal, *os.File) {
	dir := setting(logEnv, defaultLog)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return journal{out: io.Discard, who: who}, nil
	}
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR|os.O_APPEND|os.O_CREATE, 0o644)
	if err != nil {
		return journal{out: io.Discard, who: who}, nil
	}
	return journal{out: f, who: who}, f
}

func (j journal) printf(format string, args ...any) {
	_, _ = fmt.Fprintf(j.out, "[%s %s %5d] %s\n", time.Now().Format("2006-01-02 15:04:05.000"), j.who, os.Getpid(), fmt.Sprintf(format, args...))
}
