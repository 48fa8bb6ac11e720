package nvmlsim

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// embedMagic ends a file with an appended description: JSON, its length in
// eight bytes, embedMagic. ELF loaders ignore data after the sections.
const embedMagic = "NVMLSIM-MACHINE\n"

type embedded struct {
	// Root is the driver root, relative to the directory of the file.
	Root        string      `json:"root"`
	Description Description `json:"description"`
}

// Embed returns the bytes to append to an installed file, with the description
// of its machine. root is the driver root relative to the file's directory.
func Embed(root string, d Description) ([]byte, error) {
	b, err := json.Marshal(embedded{Root: root, Description: d})
	if err != nil {
		return nil, fmt.Errorf("encode description: %w", err)
	}
	n := uint64(len(b))
	return append(binary.LittleEndian.AppendUint64(b, n), embedMagic...), nil
}

// Embedded reads the data that Embed appended to a file. root is the path of
// the driver root; in a container into which the file was mounted it says nothing.
func Embedded(path string) (root string, d Description, err error) {
	e, err := readEmbedded(path)
	if err != nil {
		return "", Description{}, fmt.Errorf("%s has no description of a simulated machine: %w", path, err)
	}
	resolved, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", Description{}, fmt.Errorf("driver root of %s: %w", path, err)
	}
	return filepath.Join(filepath.Dir(resolved), e.Root), e.Description, nil
}

func readEmbedded(path string) (embedded, error) {
	var e embedded
	f, err := os.Open(path)
	if err != nil {
		return e, err
	}
	defer f.Close()
	const tail = 8 + len(embedMagic)
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return e, err
	}
	b := make([]byte, tail)
	if _, err := f.ReadAt(b, max(end-int64(tail), 0)); err != nil || string(b[8:]) != embedMagic {
		return e, errors.New("nvmlsim install has appended nothing to it")
	}
	n := int64(binary.LittleEndian.Uint64(b))
	if n <= 0 || n > slotSize || n > end-int64(tail) {
		return e, fmt.Errorf("appended length %d", n)
	}
	body := make([]byte, n)
	if _, err := f.ReadAt(body, end-int64(tail)-n); err != nil {
		return e, err
	}
	return e, json.Unmarshal(body, &e)
}

// WithoutEmbedded returns the content of a file without the bytes of Embed at
// its end.
func WithoutEmbedded(path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	const tail = 8 + len(embedMagic)
	if len(b) < tail || string(b[len(b)-len(embedMagic):]) != embedMagic {
		return b, nil
	}
	n := binary.LittleEndian.Uint64(b[len(b)-tail:])
	if n > uint64(len(b)-tail) {
		return nil, fmt.Errorf("%s: appended length %d", path, n)
	}
	return b[:uint64(len(b)-tail)-n], nil
}
