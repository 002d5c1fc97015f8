import CEdge
import Foundation

#if canImport(CoreGraphics)
import CoreGraphics
#endif
#if canImport(CoreVideo)
import CoreVideo
#endif

/// Pixels row by row, of red, green, blue and alpha, 8 bits each; alpha is not multiplied into the others.
public struct Pixels: Sendable {
    public let rgba: [UInt8]
    public let width: Int
    public let height: Int

    /// Throws `.badArgument` unless there are four bytes for each pixel.
    public init(rgba: [UInt8], width: Int, height: Int) throws {
        guard width > 0, height > 0, width <= 1 << 20, height <= 1 << 20, rgba.count == 4 * width * height else {
            throw EdgeError(code: .badArgument, message: "\(rgba.count) bytes for \(width) × \(height) pixels of 4")
        }
        (self.rgba, self.width, self.height) = (rgba, width, height)
    }
}

extension EdgeModel {
    /// Tokens of a picture of this size, before it is encoded. `tokens`: the most; 0: as many as the bundle was exported
    /// for. Throws `.unsupported` if the bundle has no eyes.
    public func imageTokens(width: Int, height: Int, tokens: Int = 0) throws -> Int {
        let sizes = [width, height, tokens].map { UInt32(exactly: $0) }
        guard let wide = sizes[0], let high = sizes[1], let most = sizes[2] else {
            throw EdgeError(code: .badArgument, message: "a picture of \(width) × \(height) pixels, \(tokens) tokens")
        }
        var count: Int64 = 0
        try EdgeError.check {
            count = edge_image_tokens(handle, wide, high, most, &$0)
            return count < 0 ? Int32(count) : 0
        }
        return Int(count)
    }
}

extension EdgeSession {
    /// Shows a picture, which stands before the text that is asked or appended next; several stand there in their order. It
    /// is encoded now, which takes as long as a prompt of some hundred tokens. `tokens`: the most that it may have; 0: as
    /// many as the bundle was exported for. `eyes`: the path of eyes.edge; nil: the package's own. What is transparent is
    /// white. Throws `.unsupported` if the bundle has no eyes, `.full` if the picture does not fit.
    public func image(_ pixels: Pixels, tokens: Int = 0, eyes: String? = nil) async throws {
        guard let path = eyes ?? EdgeModel.file("eyes.edge") else {
            throw EdgeError(code: .unsupported, message: "the package has no eyes: export the model with --mmproj")
        }
        guard let most = UInt32(exactly: tokens) else {
            throw EdgeError(code: .badArgument, message: "tokens is \(tokens), but must not be negative")
        }
        try await change { handle in
            try withSource(path) { source in
                try pixels.rgba.withUnsafeBufferPointer { bytes in
                    var picture = edge_picture()
                    picture.size = UInt32(MemoryLayout<edge_picture>.size)
                    picture.pixels = UnsafeRawPointer(bytes.baseAddress)
                    picture.width = UInt32(pixels.width)
                    picture.height = UInt32(pixels.height)
                    picture.stride = UInt32(4 * pixels.width)
                    picture.channels = 4
                    picture.tokens = most
                    try EdgeError.check { edge_image(handle, &source, &picture, &$0) }
                }
            }
        }
    }

    #if canImport(CoreGraphics)
    /// Shows an image as it is stored: one of a camera may have to be turned first.
    public func image(_ image: CGImage, tokens: Int = 0, eyes: String? = nil) async throws {
        try await self.image(Pixels(image), tokens: tokens, eyes: eyes)
    }
    #endif

    #if canImport(CoreVideo)
    /// Shows a frame of a camera, in `kCVPixelFormatType_32BGRA`.
    public func image(_ frame: CVPixelBuffer, tokens: Int = 0, eyes: String? = nil) async throws {
        try await self.image(Pixels(frame), tokens: tokens, eyes: eyes)
    }
    #endif
}

#if canImport(CoreGraphics)
extension Pixels {
    /// On white.
    public init(_ image: CGImage) throws {
        let (width, height) = (image.width, image.height)
        var rgba = [UInt8](repeating: 255, count: 4 * width * height)
        let drawn = rgba.withUnsafeMutableBytes { bytes -> Bool in
            guard
                let context = CGContext(
                    data: bytes.baseAddress, width: width, height: height, bitsPerComponent: 8, bytesPerRow: 4 * width,
                    space: CGColorSpaceCreateDeviceRGB(), bitmapInfo: CGImageAlphaInfo.premultipliedLast.rawValue
                )
            else { return false }
            context.draw(image, in: CGRect(x: 0, y: 0, width: width, height: height))
            return true
        }
        guard drawn else { throw EdgeError(code: .badArgument, message: "the image cannot be drawn") }
        try self.init(rgba: rgba, width: width, height: height)
    }
}
#endif

#if canImport(CoreVideo)
extension Pixels {
    /// Of a frame in `kCVPixelFormatType_32BGRA`. Throws `.badArgument` for other formats.
    public init(_ frame: CVPixelBuffer) throws {
        guard CVPixelBufferGetPixelFormatType(frame) == kCVPixelFormatType_32BGRA else {
            throw EdgeError(
                code: .badArgument, message: "the frame is not in kCVPixelFormatType_32BGRA: ask the camera for it")
        }
        CVPixelBufferLockBaseAddress(frame, .readOnly)
        defer { CVPixelBufferUnlockBaseAddress(frame, .readOnly) }
        guard let base = CVPixelBufferGetBaseAddress(frame) else {
            throw EdgeError(code: .badArgument, message: "the frame has no pixels in memory")
        }
        let (width, height) = (CVPixelBufferGetWidth(frame), CVPixelBufferGetHeight(frame))
        let stride = CVPixelBufferGetBytesPerRow(frame)
        let bytes = base.assumingMemoryBound(to: UInt8.self)
        var rgba = [UInt8](repeating: 255, count: 4 * width * height)
        for row in 0..<height {
            for column in 0..<width {
                let (from, to) = (row * stride + 4 * column, 4 * (row * width + column))
                rgba[to] = bytes[from + 2]
                rgba[to + 1] = bytes[from + 1]
                rgba[to + 2] = bytes[from]
            }
        }
        try self.init(rgba: rgba, width: width, height: height)
    }
}
#endif
