package image

import (
	"archive/tar"
	"fmt"
	"io"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/tessera-dra/tessera/deployments/container/image/imagetest"
)

// list prints the entries of an image's only layer.
func list(t *testing.T, img v1.Image) []string {
	t.Helper()
	var lines []string
	imagetest.Each(t, img, func(h *tar.Header, content io.Reader) {
		line := fmt.Sprintf("%s %o %c %d", h.Name, h.Mode, h.Typeflag, h.ModTime.Unix())
		if h.Linkname != "" {
			line += " -> " + h.Linkname
		}
		if h.Typeflag == tar.TypeReg {
			data, err := io.ReadAll(content)
			if err != nil {
				t.Fatal(err)
			}
			line += ": " + string(data)
		}
		lines = append(lines, line)
	})
	return lines
}
