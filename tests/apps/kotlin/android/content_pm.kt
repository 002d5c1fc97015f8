package android.content.pm

class PackageInfo(@JvmField val lastUpdateTime: Long)

class PackageManager {
    fun getPackageInfo(packageName: String, flags: Int) =
        PackageInfo(updated.takeIf { packageName == "com.example.chat" && flags == 0 }!!)

    companion object {
        var updated = 1L
    }
}
