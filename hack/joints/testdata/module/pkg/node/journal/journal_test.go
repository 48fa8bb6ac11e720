package journal

type double interface{ Double() }

type doubles struct{ double func() }
