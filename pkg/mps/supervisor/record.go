package supervisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/tessera-dra/tessera/pkg/mps"
)

const (
	recordVersion = 1
	// maxRecordSize is far above what the devices of one node can fill.
	maxRecordSize = 64 << 10
)

// record is the content of daemon.json.
type record struct {
	Daemon mps.Daemon `json:"daemon"`
	// PID of the control daemon; 0 before it runs.
	PID int `json:"pid,omitempty"`
	// Start of that process, as /proc/PID/stat has it: process ids come again.
	Start uint64 `json:"start,omitempty"`
	// BootID that Start counts from.
	BootID   string `json:"bootID,omitempty"`
	Restarts int    `json:"restarts,omitempty"`
	// Stopping: it is being stopped.
	Stopping bool `json:"stopping,omitempty"`
}

// envelope wraps a record on disk.
type envelope struct {
	Version int `json:"version"`
	// CRC32 (IEEE) of the bytes of Body as they are in the file.
	CRC32 uint32          `json:"crc32"`
	Body  json.RawMessage `json:"body"`
}

func encode(r record) ([]byte, error) {
	body, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	return json.Marshal(envelope{Version: recordVersion, CRC32: crc32.ChecksumIEEE(body), Body: body})
}

// decode reads the record of the daemon with this name.
func decode(name string, data []byte) (record, error) {
	var e envelope
	if err := json.Unmarshal(data, &e); err != nil {
		return record{}, fmt.Errorf("not a record: %w", err)
	}
	if e.Version != recordVersion {
		return record{}, fmt.Errorf("there is no format %d here", e.Version)
	}
	if sum := crc32.ChecksumIEEE(e.Body); sum != e.CRC32 {
		return record{}, fmt.Errorf("the checksum is %d, the file says %d", sum, e.CRC32)
	}
	var r record
	if err := json.Unmarshal(e.Body, &r); err != nil {
		return record{}, fmt.Errorf("not a record: %w", err)
	}
	if r.Daemon.Name != name {
		return record{}, fmt.Errorf("the record is of %q", r.Daemon.Name)
	}
	if r.PID < 0 || r.Restarts < 0 {
		return record{}, errors.New("negative numbers in the record")
	}
	return r, r.Daemon.Validate()
}

func readRecord(path, name string) (record, error) {
	f, err := os.Open(path)
	if err != nil {
		return record{}, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxRecordSize))
	if err != nil {
		return record{}, err
	}
	return decode(name, data)
}

// RecordedDaemon reads the daemon of the directory d/name of a supervisor's run
// directory.
func RecordedDaemon(runDir, name string) (mps.Daemon, error) {
	cfg := Config{RunDir: runDir}
	r, err := readRecord(cfg.place(name).record(), name)
	return r.Daemon, err
}

// writeRecord replaces the file. It isn't synced: after the machine went down
// there is neither the file nor the daemon.
func writeRecord(path string, r record) error {
	data, err := encode(r)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	temp, err := os.CreateTemp(filepath.Dir(path), "daemon.json.*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	_, err = temp.Write(data)
	if err = errors.Join(err, temp.Close()); err == nil {
		err = os.Rename(temp.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, errors.Join(err, os.Remove(temp.Name())))
	}
	return nil
}

// bootID of the running kernel.
func bootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot ID: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}
